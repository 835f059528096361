// Draws STAGES (step-data.js) into #step: three blocks, one rank of four; buttons choose the stage, a slider the step.
(() => {
  const root = document.getElementById("step");
  const ROW = 4; // ranks: each has a quarter of a weight's rows
  const say = {
    full: "full", shard: "1/4", arriving: "arriving", stale: "full, old rows", refreshed: "rows arriving",
    none: "none", made: "being made", leaving: "leaving", mean: "mean",
  };
  const filled = { full: ROW, stale: ROW, refreshed: ROW, arriving: ROW, made: ROW, leaving: ROW, shard: 1, none: 0 };
  let stage = 3, at = 0;

  const make = (tag, name, text = "") => Object.assign(document.createElement(tag), { className: name, textContent: text });

  function bar(kind, word) {
    const line = make("div", "step-line", `${kind}: ${say[word]}`);
    const cells = make("span", `step-cells step-${kind} step-is-${word}`);
    const many = word === "mean" ? (stage === 0 ? ROW : 1) : filled[word];
    for (let i = 0; i < ROW; i++) cells.append(make("i", i < many ? "on" : ""));
    line.append(cells);
    return line;
  }

  function sentence(step) {
    const which = (list, word) => list.flatMap((found, i) => (found === word ? [i] : []));
    const name = (blocks) => `block${blocks.length > 1 ? "s" : ""} ${blocks.join(" and ")}`;
    const parts = [["arriving", "weights", "is gathered"], ["refreshed", "weights", "gets the new rows of other ranks"]]
      .flatMap(([word, list, does]) => { const b = which(step[list], word); return b.length ? [`${name(b)} ${does}`] : []; });
    const leaving = which(step.grads, "leaving");
    if (leaving.length) parts.push(`the gradients of ${name(leaving)} travel`);
    const now = step.block === null ? "The optimizer steps the rows that this rank owns" :
      `${step.phase === "forward" ? "Forward" : "Backward"} of block ${step.block} computes`;
    return `${now}${parts.length ? "; meanwhile " + parts.join(", and ") : ""}.`;
  }

  function draw() {
    const step = STAGES[stage].steps[at];
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", i === stage));
    slider.value = at;
    slider.setAttribute("aria-valuetext", sentence(step));
    blocks.replaceChildren(...step.weights.map((word, i) => {
      const card = make("div", "step-block" + (i === step.block ? " step-computes" : ""));
      const does = i === step.block ? ` computes ${step.phase}` : "";
      card.append(make("b", "", `block ${i}${does}`), bar("weight", word), bar("gradient", step.grads[i]));
      return card;
    }));
    text.textContent = sentence(step);
    sent.textContent = `Step ${at + 1} of ${STAGES[stage].steps.length}. Sent so far by this rank: ${step.sent} blocks.`;
  }

  const go = (to) => { at = Math.max(0, Math.min(STAGES[stage].steps.length - 1, to)); draw(); };
  const button = (label, act) => Object.assign(make("button", "", label), { type: "button", onclick: act });
  const tabs = STAGES.map((one, i) => button(one.name, () => { stage = i; draw(); }));
  const slider = Object.assign(make("input", ""), { type: "range", min: 0, max: STAGES[0].steps.length - 1 });
  slider.setAttribute("aria-label", "step");
  slider.oninput = () => go(Number(slider.value));
  const blocks = make("div", "step-blocks"), text = make("p", "step-text"), sent = make("p", "step-sent");
  text.setAttribute("aria-live", "polite");
  const stages = make("div", "step-row"), moves = make("div", "step-row");
  stages.append(make("span", "", "Stage"), ...tabs);
  moves.append(button("back", () => go(at - 1)), slider, button("next", () => go(at + 1)));
  root.replaceChildren(stages, blocks, text, moves, sent);
  draw();
})();
