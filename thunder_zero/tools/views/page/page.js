// Draws the page: lanes and memory on a canvas, and a list of lines. Only the visible lines are in the DOM.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const make = (tag, properties, ...children) => {
  const { style, ...others } = properties;
  const element = Object.assign(document.createElement(tag), others);
  if (style) element.style.cssText = style;
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
};
const moment = (seconds) => (whole >= 1 ? `${seconds.toFixed(6)} s` : `${(seconds * 1e3).toFixed(whole >= 1e-3 ? 3 : 6)} ms`);
const startOf = (lines, line) => lines.end[line - 1] ?? 0;
const nameOfColour = (unit) => `u${unit <= 0 ? -1 : (unit - 1) % 8}`;
const unitColour = (unit) => `var(--${nameOfColour(unit)})`;
const em = () => parseFloat(getComputedStyle(document.documentElement).fontSize);
const KINDS = {
  "parameters at rest": "#5f7fa8", "buffers of the module": "#8ea3bd", "optimizer state": "#a9bad0", "state of the outer step": "#b9a68c", "inputs": "#c5ccd5",
  "gathered parameters": "#46aaa3", "saved for backward": "#e6b04f", "full gradients": "#d2605f",
  "reduced gradients": "#e5a2a0", "deferred gradients": "#bd82ad", "buffers of collectives": "#9783d0",
  "outputs and loss": "#9fb45f", "temporaries": "#c4bcae",
};

// The state: the selected program, line and parameter, and the visible range of seconds.
const whole = Math.max(...page.programs.map((program) => program.figures.step_seconds)) || 1;
const view = { start: 0, end: whole };
const chosen = { program: -1, line: -1, parameter: -1 };
const current = () => page.programs[chosen.program];
const phaseOf = (program, line) => program.phases.find(({ last }) => line <= last).name;
const collectiveOf = (program, line) => program.collectives[program.lines.collective[line]];

function choose(program, line, { parameter, zoom = false } = {}) {
  const isOther = program !== chosen.program;
  Object.assign(chosen, { program, line });
  const { lines } = current(), parameters = line < 0 ? [] : lines.params[line];
  chosen.parameter = parameter ?? (parameters.includes(chosen.parameter) ? chosen.parameter : parameters[0] ?? -1);
  if (zoom && line >= 0) zoomTo(line);
  else if (line >= 0 && (lines.end[line] < view.start || startOf(lines, line) > view.end)) pan(lines.end[line] - (view.start + view.end) / 2);
  if (isOther) showProgram();
  showChosen();
  showTrace(true);
  markTable();
  draw();
  if (line < 0) return;
  const place = lines.op[line] < 0 ? `line=${line}` : `op=${lines.op[line]}`;
  const link = `#${program ? `program=${program}&` : ""}${place}`;
  if (link !== location.hash) history[zoom ? "pushState" : "replaceState"](null, "", link); // Back returns to the last jump
  $("said").textContent = `${place}, ${lines.kind[line] || phaseOf(current(), line)} ${lines.label[line]}: ${lines.code[line]}`;
}
// Zoom to a line, and scroll it or its panel into view, after a selection outside the picture.
function goTo(program, line, parameter) {
  choose(program, line, { parameter, zoom: true });
  const place = $(innerWidth > 60 * em() ? "step-title" : "chosen-title"), { top } = place.getBoundingClientRect();
  if (top < 0 || top > innerHeight / 2) place.scrollIntoView();
}
function openLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const program = Math.min(Number(link.get("program") ?? 0), page.programs.length - 1) || 0, { lines } = page.programs[program];
  const line = link.has("op") ? lines.op.indexOf(Number(link.get("op"))) : Number(link.get("line") ?? -1);
  if (line in lines.code) goTo(program, line);
}

// The lanes and the memory.
const canvas = $("lanes"), pen = canvas.getContext("2d");
let text = 12, gutter = 90, width = 800, areas = [], colours = {};

function zoomBy(factor, center = (view.start + view.end) / 2) {
  const length = Math.min(whole, Math.max(whole / 1e6, (view.end - view.start) * factor));
  show(center - ((center - view.start) / (view.end - view.start)) * length, length);
}
function show(from, length) {
  const start = Math.max(0, Math.min(whole - length, from));
  Object.assign(view, { start, end: start + length });
  drawSoon();
}
const pan = (seconds) => show(view.start + seconds, view.end - view.start);
const fit = () => show(0, whole);
function zoomTo(line) {
  const { lines } = current(), collective = collectiveOf(current(), line);
  const start = collective ? lines.end[collective.launch] : startOf(lines, line), end = lines.end[collective ? collective.wait : line];
  const length = Math.min(whole, Math.max((end - start) * 3, whole / 40));
  show((start + end - length) / 2, length);
}
const x = (seconds) => gutter + ((seconds - view.start) / (view.end - view.start)) * (width - gutter);
const secondsAt = (place) => view.start + ((place - gutter) / (width - gutter)) * (view.end - view.start);
const isSeen = (start, end) => end >= view.start && start <= view.end;

function layOut() {
  const style = getComputedStyle(document.documentElement), several = page.programs.length > 1;
  text = 0.75 * em();
  width = canvas.clientWidth;
  gutter = Math.min(7.2 * em(), width * 0.2);
  for (const name of ["ink", "quiet", "panel", "line", "chosen", "shade", "warn", ...[-1, 0, 1, 2, 3, 4, 5, 6, 7].map((unit) => `u${unit}`)])
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  let y = 1.4 * em();
  areas = page.programs.map((program) => {
    const top = y, phases = y + (several ? 1.4 : 0) * em(), units = phases + 1.2 * em(), lane = 1.55 * em();
    const lanes = program.lanes.map((_, index) => units + (1.35 + 1.75 * index) * em());
    const memory = lanes.at(-1) + 2.05 * em(), height = program.memory ? (several ? 8.5 : 11) * em() : 0;
    y = memory + height + 1.1 * em();
    return { top, phases, units, lanes, lane, memory, height, bottom: memory + height };
  });
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${y}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(y * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  for (const name of ["quiet", "warn"]) colours[`${name} hatch`] = hatch(colours[name]);
}
function hatch(colour) {
  const tile = make("canvas", { width: 8, height: 8 }), brush = tile.getContext("2d");
  brush.strokeStyle = colour;
  brush.lineWidth = 1.6;
  for (const shift of [-8, 0, 8]) { brush.moveTo(shift, 8); brush.lineTo(shift + 8, 0); }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}
function write(words, left, y, { colour = colours.ink, align = "left", bold = false } = {}) {
  pen.font = `${bold ? 600 : 400} ${text}px system-ui, sans-serif`;
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.textBaseline = "middle";
  pen.fillText(words, left, y);
}
// Call the function with a clipped pen: from the gutter on, or between two places.
function clipped(paint, left = gutter, room = width - left) {
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, room, canvas.clientHeight);
  pen.clip();
  paint();
  pen.restore();
}
// Fill the time from start to end, at least a pixel, with words if there is room for them.
function bar(start, end, y, height, fill, words = "") {
  const left = Math.max(gutter, x(start)), room = Math.max(Math.min(width, x(end)) - left, 0.7);
  pen.fillStyle = fill;
  pen.fillRect(left, y, room, height);
  if (room > 1.2 * text && words) clipped(() => write(words, left + 3, y + height / 2, { colour: "#14181d" }), left, room - 2);
  return room;
}

let waits = false; // draw once for all moves within a frame
function drawSoon() {
  if (!waits) requestAnimationFrame(() => { waits = false; draw(); });
  waits = true;
}
function draw() {
  pen.clearRect(0, 0, canvas.width, canvas.height);
  drawAxis();
  page.programs.forEach((program, index) => {
    const area = areas[index], isChosen = index === chosen.program;
    if (page.programs.length > 1) write(program.name, 0, area.top + 0.8 * text, { bold: true, colour: isChosen ? colours.chosen : colours.ink });
    clipped(() => {
      write("units", 0, area.units + 0.75 * text, { colour: colours.quiet });
      program.lanes.forEach((lane, number) => write(lane, 0, area.lanes[number] + area.lane / 2));
      if (program.memory) write("memory", 0, area.memory + 2 * text);
    }, 0, gutter - 4);
    if (program.memory) drawScale(area);
    clipped(() => {
      drawPhases(program, area);
      drawLanes(program, area);
      if (program.memory) drawMemory(program, area);
      if (isChosen && chosen.line >= 0) drawChosen(program, area);
    });
  });
}
function drawAxis() {
  const rough = (view.end - view.start) / Math.max(3, (width - gutter) / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((candidate) => candidate >= rough);
  const [unit, scale] = view.end >= 1 ? ["s", 1] : view.end >= 1e-3 ? ["ms", 1e3] : ["us", 1e6];
  for (let tick = Math.ceil(view.start / step) * step; tick <= view.end; tick += step) {
    pen.fillStyle = colours.line;
    pen.fillRect(x(tick), text * 1.4, 1, canvas.clientHeight);
    const align = x(tick) > width - 3 * text ? "right" : x(tick) < gutter + 2 * text ? "left" : "center";
    write(`${(tick * scale).toFixed(Math.max(0, -Math.floor(Math.log10(step * scale * 1.001))))} ${unit}`, x(tick), text * 0.7, { colour: colours.quiet, align });
  }
}
function drawPhases({ phases, runs, lines, units }, area) {
  phases.forEach(({ name, last }, index) => {
    const start = x(index ? lines.end[phases[index - 1].last] : 0), left = Math.max(start, gutter), room = Math.min(x(lines.end[last]), width) - left;
    pen.fillStyle = colours.ink;
    pen.fillRect(start, area.phases, 1.5, area.bottom - area.phases);
    if (room > 3 * text) clipped(() => write(name, left + 4, area.phases + 0.8 * text, { bold: true }), left, room);
  });
  for (const [unit, first, last] of runs)
    if (isSeen(startOf(lines, first), lines.end[last])) bar(startOf(lines, first), lines.end[last], area.units, 1.5 * text, colours[nameOfColour(unit)], units[unit].split(".").at(-1));
}
function drawLanes({ bars, lines, units }, area) {
  const last = area.lanes.map(() => -9);
  bars.line.forEach((line, index) => {
    const start = bars.start[index], end = bars.end[index], lane = bars.lane[index], y = area.lanes[lane], right = Math.floor(x(end));
    if (!isSeen(start, end) || (x(end) - x(start) < 1 && right === last[lane])) return;
    last[lane] = right;
    if (bars.waits[index]) {
      bar(start, end, area.lanes[0], area.lanes.at(-1) + area.lane - area.lanes[0], colours.shade);
      bar(start, end, y, area.lane, colours["warn hatch"]);
      if (x(end) - x(start) > 4 * text) plate("waits", Math.max(gutter, x(start)) + 3, y + 0.25 * text, colours.warn);
      return;
    }
    const unit = units[lines.unit[line]] ?? "", isWide = x(end) - x(start) > 7 * text;
    const room = bar(start, end, y, area.lane, colours[nameOfColour(lines.unit[line])], isWide ? lines.label[line] || unit || "root" : unit.split(".").at(-1));
    pen.strokeStyle = colours.panel;
    pen.lineWidth = 1;
    if (room > 6) pen.strokeRect(x(start), y, x(end) - x(start), area.lane);
  });
}
const yOf = (area, bytes) => area.bottom - (bytes / page.most_bytes) * area.height;
function drawScale(area) {
  page.scale.forEach((words, halves) => {
    const y = area.bottom - (halves / 2) * area.height;
    pen.fillStyle = colours.line;
    pen.fillRect(gutter, y, width - gutter, 1);
    write(words, gutter - 6, y + [-0.3, 0, 0.5][halves] * text, { colour: colours.quiet, align: "right" });
  });
}
function drawMemory({ memory, lines }, area) {
  const seen = [...lines.end.keys()].filter((line) => isSeen(startOf(lines, line), lines.end[line]));
  const places = seen.map((line) => [x(startOf(lines, line)), x(lines.end[line])]); // of a line's steps
  const band = (lower, upper, fill) => {
    pen.beginPath();
    seen.forEach((line, index) => places[index].forEach((place) => pen.lineTo(place, yOf(area, upper(line)))));
    for (let index = seen.length - 1; index >= 0; index--) for (const side of [1, 0]) pen.lineTo(places[index][side], yOf(area, lower(seen[index])));
    pen.fillStyle = fill;
    pen.fill();
  };
  const level = (kind) => (line) => (kind < 0 ? memory.reserve : memory.levels[kind][line]), highest = (line) => lines.highest[line];
  memory.kinds.forEach((kind, number) => band(level(number - 1), level(number), KINDS[kind]));
  band(level(memory.kinds.length - 1), highest, colours["quiet hatch"]);
  pen.strokeStyle = colours.ink;
  pen.lineWidth = 1;
  pen.beginPath();
  seen.forEach((line, index) => places[index].forEach((place) => pen.lineTo(place, yOf(area, highest(line)))));
  pen.stroke();
  if (memory.capacity < page.most_bytes) {
    dashed(gutter, yOf(area, memory.capacity), width - gutter, 0, colours.ink);
    plate(memory.room, gutter + 4, yOf(area, memory.capacity) - 1.4 * text, colours.ink);
  }
  const peak = x(lines.end[memory.peak.line]), y = yOf(area, memory.peak.bytes), words = `peak ${memory.peak.size}`;
  dashed(peak, area.phases + 1.5 * text, 0, area.bottom - area.phases - 1.5 * text, colours.warn);
  pen.fillStyle = colours.warn;
  pen.beginPath();
  pen.arc(peak, y, 4, 0, 7);
  pen.fill();
  plate(words, peak > width - 12 * text ? peak - 10 * text : peak + 6, y - 0.2 * text, colours.warn);
}
function dashed(left, top, wide, high, colour) {
  pen.setLineDash([6, 4]);
  pen.strokeStyle = colour;
  pen.strokeRect(left, top, wide, high);
  pen.setLineDash([]);
}
// Bold words on a plate, so that lines do not run through them.
function plate(words, left, top, colour) {
  pen.font = `600 ${text}px system-ui, sans-serif`;
  pen.fillStyle = colours.panel;
  pen.fillRect(left, top, pen.measureText(words).width + 8, 1.4 * text);
  write(words, left + 4, top + 0.75 * text, { colour, bold: true });
}
function drawChosen(program, area) {
  const { bars, lines } = program, collective = collectiveOf(program, chosen.line), related = collective ? [collective.launch, collective.wait] : [chosen.line];
  const frame = (isFramed, colour, thick) => bars.line.forEach((line, index) => {
    if (!isFramed(line) || !isSeen(bars.start[index], bars.end[index])) return;
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    pen.strokeRect(x(bars.start[index]), area.lanes[bars.lane[index]], Math.max(1, x(bars.end[index]) - x(bars.start[index])), area.lane);
  });
  frame((line) => lines.params[line].includes(chosen.parameter), colours.ink, 1.5);
  frame((line) => related.includes(line), colours.chosen, 3);
  const left = x(lines.end[chosen.line]);
  pen.fillStyle = colours.chosen;
  pen.fillRect(left - 1, area.units, 2, area.bottom - area.units);
  write("▼", left, area.units - 2, { colour: colours.chosen, align: "center" });
}
function hit(event) {
  const box = canvas.getBoundingClientRect(), left = event.clientX - box.left, top = event.clientY - box.top;
  const time = secondsAt(left), near = secondsAt(3) - secondsAt(0);
  const index = areas.findIndex((area) => top >= area.top && top <= area.bottom), area = areas[index], program = page.programs[index];
  if (index < 0 || left < gutter) return null;
  const { bars, lines, memory } = program, lane = area.lanes.findIndex((y) => top >= y && top <= y + area.lane);
  if (lane >= 0) {
    const found = bars.line.findIndex((_, bar) => bars.lane[bar] === lane && bars.start[bar] - near <= time && time <= bars.end[bar] + near);
    return found < 0 ? null : { program: index, line: bars.line[found], words: `${bars.waits[found] ? "compute waits" : program.lanes[lane]} ${bars.took[found]}` };
  }
  if (top >= area.units && top < area.lanes[0]) {
    const run = program.runs.find(([, first, last]) => time >= startOf(lines, first) && time <= lines.end[last]);
    return run ? { program: index, line: run[1], words: "" } : null;
  }
  if (!memory || top < area.memory) return null;
  const line = lines.end.reduce((best, end, index) => (end >= time - near && startOf(lines, index) <= time + near && !(lines.highest[index] <= lines.highest[best]) ? index : best), -1);
  const kind = memory.levels.findIndex((levels) => yOf(area, levels[line]) <= top);
  return line < 0 ? null : { program: index, line, words: kind < 0 ? "" : memory.kinds[kind] };
}
function tell(event) {
  const target = hit(event), program = page.programs[target?.program ?? 0], { lines, units } = program, line = target?.line;
  canvas.title = !target ? "" : [`${lines.kind[line] || phaseOf(program, line)} ${lines.label[line] || units[lines.unit[line]] || ""}`, target.words, bytesAt(lines, line)].filter(Boolean).join("\n");
}
const bytesAt = (lines, line) => lines.alive[line] && `${lines.alive[line]} after it, ${lines.most[line] || lines.alive[line]} at most while it runs`;
let drag = null;
canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, moved: 0 }; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return tell(event);
  const by = event.clientX - drag.x;
  drag = { x: event.clientX, moved: drag.moved + Math.abs(by) };
  pan((-by / (width - gutter)) * (view.end - view.start));
});
canvas.addEventListener("pointerup", (event) => {
  const target = drag && drag.moved < 4 ? hit(event) : null;
  drag = null;
  if (target) choose(target.program, target.line);
});
canvas.addEventListener("wheel", (event) => {
  const length = view.end - view.start;
  if (event.deltaY > 0 && length >= whole && !event.shiftKey) return; // fully zoomed out: let the page scroll
  event.preventDefault();
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(((event.deltaX || event.deltaY) / width) * length);
  else zoomBy(1.002 ** event.deltaY, secondsAt(event.clientX - canvas.getBoundingClientRect().left));
}, { passive: false });
const step = (by) => choose(chosen.program, chosen.line < 0 ? 0 : Math.max(0, Math.min(current().lines.code.length - 1, chosen.line + by)));
const KEYS = {
  "+": () => zoomBy(0.6), "=": () => zoomBy(0.6), "-": () => zoomBy(1 / 0.6), "0": fit, Home: fit,
  ArrowLeft: () => pan(-(view.end - view.start) / 6), ArrowRight: () => pan((view.end - view.start) / 6),
  ArrowDown: () => step(1), ArrowUp: () => step(-1), PageDown: () => step(20), PageUp: () => step(-20),
  Enter: () => chosen.line >= 0 && choose(chosen.program, chosen.line, { zoom: true }), Escape: () => choose(chosen.program, -1),
};
addEventListener("keydown", (event) => {
  const everywhere = ["+", "=", "-", "0", "Escape"].includes(event.key) && !event.target.closest("input, select");
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey || !(everywhere || event.target.closest("#lanes, #trace"))) return;
  event.preventDefault();
  KEYS[event.key]();
});
$("in").onclick = KEYS["+"];
$("out").onclick = KEYS["-"];
$("fit").onclick = fit;

// The lines, with the phases and the user's lines between them.
const trace = $("trace");
function showTrace(scroll = false) {
  const program = current(), { lines, rows } = program, collective = collectiveOf(program, chosen.line), height = 1.4 * em();
  $("rows").style.height = `${rows.length * height}px`;
  const top = rows.indexOf(chosen.line) * height;
  if (scroll && chosen.line >= 0 && (top < trace.scrollTop || top > trace.scrollTop + trace.clientHeight - 2 * height)) trace.scrollTop = top - trace.clientHeight / 3;
  const first = Math.max(0, Math.floor(trace.scrollTop / height) - 4), count = Math.ceil(trace.clientHeight / height) + 8;
  $("rows").replaceChildren(...rows.slice(first, first + count).map((line, index) => {
    const style = `top: ${(first + index) * height}px;`;
    if (typeof line === "string") return make("div", { className: `row text ${line.startsWith("#") ? "" : "phase"}`, style, title: line }, line);
    const isPeak = program.memory?.peak.line === line, isChosen = line === chosen.line, launched = collectiveOf(program, line);
    const related = (collective && (line === collective.launch || line === collective.wait)) || lines.params[line].includes(chosen.parameter);
    return make("div", { className: `row ${isChosen ? "is" : related ? "of" : ""}`, id: `line-${line}`, role: "option", ariaSelected: String(isChosen), title: lines.code[line], style: `${style} border-color: ${unitColour(lines.unit[line])}`, onclick: () => choose(chosen.program, line) },
      ...[lines.op[line] < 0 ? "" : lines.op[line], lines.code[line], lines.kind[line], lines.label[line], launched?.launch === line ? launched.words[0] : ""].map((cell) => make("span", {}, String(cell))),
      make("span", { className: isPeak ? "peak" : "" }, isPeak ? "▲ peak" : lines.alive[line]));
  }));
  trace.setAttribute("aria-activedescendant", chosen.line < 0 ? "" : `line-${chosen.line}`);
}
trace.addEventListener("scroll", () => showTrace());

// The selection.
const place = (program, line) => (program.lines.op[line] < 0 ? phaseOf(program, line) : `op ${program.lines.op[line]}`);
const jump = (words, line) => make("button", { className: "link", type: "button", onclick: () => goTo(chosen.program, line) }, words);
const swatch = (colour) => make("span", { className: "swatch", style: `background: ${colour}` });
const item = (size, ...words) => make("li", {}, make("b", {}, size), make("span", {}, ...words));
function facts(pairs) {
  return make("dl", {}, ...pairs.filter(([, value]) => value !== "").flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, ...[value].flat())]));
}
function tensorList(program, line, most) {
  const { tensors, kinds, tops, top } = program.memory;
  return make("ul", {}, ...tops[top[line]].slice(0, most).map((index) => {
    const kind = kinds[tensors.kind[index]], made = tensors.made[index];
    return item(tensors.size[index], swatch(KINDS[kind]), `${kind}: `, made < 0 ? tensors.name[index] : jump(tensors.name[index] || place(program, made), made));
  }));
}
function showChosen() {
  const program = current(), { lines } = program, line = chosen.line, panel = $("chosen");
  if (line < 0) return panel.replaceChildren(make("p", { className: "note" }, "Select a line, a bar, a moment of the memory curve or a collective: all of them show it."));
  const collective = collectiveOf(program, line), waited = ["wait", "tensor"].includes(lines.kind[line]), parameters = lines.params[line];
  const [sent, wire, exposed, hidden] = collective?.words ?? [];
  panel.replaceChildren(
    make("div", { className: "says" }, lines.code[line]),
    facts([
      ["place", [`${phaseOf(program, line)}, `, make("a", { href: location.pathname.split("/").pop() + location.hash }, lines.op[line] < 0 ? `line ${line}` : `op ${lines.op[line]}`)]],
      ["does", `${lines.kind[line] || phaseOf(program, line)} ${lines.label[line]}`],
      ["unit", lines.unit[line] < 0 ? "" : [swatch(unitColour(lines.unit[line])), program.units[lines.unit[line]] || "root unit"]],
      ["from", lines.origins[lines.origin[line]]],
      ...(lines.types?.[line] ? [["writes", lines.types[line]]] : []),
      ["time", lines.took[line] ? `${moment(startOf(lines, line))} to ${moment(lines.end[line])}: ${waited ? "compute waits " : ""}${lines.took[line]}` : `at ${moment(lines.end[line])}; takes no time of its own`],
      ...(collective ? [["on the wire", `${wire}, ${sent} sent by this rank`],
        ["hidden", collective.exposed_seconds ? `${hidden}: compute waits ${exposed}: ${collective.why_exposed}` : "all of it"],
        ["why there", collective.why], ["links", [jump("launch", collective.launch), " · ", jump("wait", collective.wait)]]] : []),
      ["alive", bytesAt(lines, line)],
    ]),
  );
  if (parameters.length) {
    const pick = make("select", { ariaLabel: "Parameter", onchange: () => choose(chosen.program, line, { parameter: Number(pick.value) }) },
      ...parameters.map((parameter) => make("option", { value: parameter, selected: parameter === chosen.parameter }, program.parameters[parameter].path)));
    panel.append(make("h2", {}, "Its parameter ", pick),
      make("div", { className: "says", id: "explained" }, ...program.parameters[chosen.parameter].explained.split("\n").map((row) => make("div", {}, row || " "))));
  }
  if (program.memory) panel.append(make("h2", {}, "Alive here, the largest"), tensorList(program, line, 8));
}

// The collectives.
const launchOf = (one) => current().lines.end[one.launch], waitOf = (one) => startOf(current().lines, one.wait);
const COLUMNS = [
  ["unit", (one) => one.unit || "root unit"], ["kind", (one) => `${one.kind}, ${one.backward ? "backward" : "forward"}`], ["parameters", (one) => one.label],
  ["sent", (one) => one.sent_bytes, (one) => one.words[0]], ["launch", launchOf, (one) => moment(launchOf(one))], ["wait", waitOf, (one) => moment(waitOf(one))],
  ["on the wire", (one) => one.wire_seconds, (one) => one.words[1]], ["compute waits", (one) => one.exposed_seconds, (one) => one.words[2]], ["hidden", (one) => one.hidden, (one) => one.words[3]],
  ["why it stands there; why compute waits", (one) => one.why + (one.why_exposed ? `. Compute waits: ${one.why_exposed}` : "")],
];
const order = { column: -1, down: false }, table = $("table"), heads = table.tHead.rows[0].cells;
table.tHead.rows[0].append(...COLUMNS.map(([name, , words], column) => make("th", { scope: "col", className: words ? "" : "text" },
  make("button", { type: "button", onclick: () => { Object.assign(order, { down: order.column === column ? !order.down : Boolean(words), column }); showTable(); } }, name))));
function showTable() {
  const { collectives, units } = current(), filter = $("filter").value.toLowerCase(), [, value] = COLUMNS[order.column] ?? [];
  const rows = collectives.filter((one) => (!$("waiting").checked || one.exposed_seconds) && COLUMNS.some(([, cell, words]) => !words && cell(one).toLowerCase().includes(filter)));
  if (value) rows.sort((first, second) => (order.down ? -1 : 1) * (value(first) > value(second) ? 1 : value(first) < value(second) ? -1 : 0));
  [...heads].forEach((head, column) => {
    head.ariaSort = column === order.column ? (order.down ? "descending" : "ascending") : "none";
  });
  $("count").textContent = `${rows.length} of ${collectives.length}`;
  table.tBodies[0].replaceChildren(...rows.map((one) => make("tr", { one, onclick: () => choose(chosen.program, one.launch, { zoom: true }) },
    ...COLUMNS.map(([name, cell, words]) => make("td", { className: words ? (name === "compute waits" && one.exposed_seconds ? "peak" : "") : "text" },
      name === "unit" ? swatch(unitColour(units.indexOf(one.unit))) : "",
      words ? words(one) : name === "parameters" ? make("button", { className: "link", type: "button" }, one.label) : cell(one))))));
  markTable();
}
function markTable() {
  const now = collectiveOf(current(), chosen.line);
  for (const row of table.tBodies[0].rows) Object.assign(row, { className: row.one === now ? "is" : "", ariaSelected: String(row.one === now) });
}
for (const id of ["filter", "waiting"]) $(id).addEventListener("input", showTable);

// The overview.
function showProgram() {
  const program = current(), { memory } = program;
  $("which").replaceChildren(...(page.programs.length < 2 ? [] : page.programs.map((one, index) => make("button", { type: "button", ariaPressed: String(one === program), onclick: () => choose(index, -1) }, one.name))));
  if (memory) {
    const kinds = Object.entries(memory.peak.by_kind), line = memory.peak.line;
    $("peak").replaceChildren(
      make("p", { className: "note" }, `${memory.peak.size} in ${phaseOf(program, line)}, at `, jump(place(program, line), line), program.left_out.length ? `; left out: ${program.left_out.join("; ")}` : ""),
      make("div", { className: "stack", role: "img", ariaLabel: "Shares of the kinds" }, ...kinds.map(([kind, bytes]) => make("i", { title: kind, style: `flex: ${bytes} 0 0; background: ${KINDS[kind]}` }))),
      make("ul", {}, ...kinds.map(([kind], index) => item(memory.peak.sizes[index], swatch(KINDS[kind]), kind))),
      make("p", { className: "note" }, "The largest tensors:"), tensorList(program, line, 4));
    $("kinds").replaceChildren(...memory.kinds.map((kind) => make("li", {}, swatch(KINDS[kind]), kind)), make("li", {}, make("span", { className: "swatch within" }), "only while a line runs"));
  } else $("peak").replaceChildren(make("p", {}, program.note));
  document.querySelectorAll("#exposed > div").forEach((part, index) => { part.hidden = index !== chosen.program; });
  showTable();
}
$("names").append(...[...page.programs[0].units.filter(Boolean), ...page.programs[0].parameters.map(({ path }) => path)].map((value) => make("option", { value })));
$("find").addEventListener("input", () => $("find").setCustomValidity(""));
$("find").addEventListener("change", () => {
  const { lines, units, parameters } = current(), words = $("find").value.trim().toLowerCase(), paths = parameters.map(({ path }) => path.toLowerCase());
  const unit = units.findIndex((name) => name && name.toLowerCase() === words);
  const parameter = unit >= 0 ? -1 : paths.includes(words) ? paths.indexOf(words) : paths.findIndex((path) => path.includes(words));
  const line = !words ? -1 : unit >= 0 ? lines.params.findIndex((all, index) => all.length && lines.unit[index] === unit) : lines.params.findIndex((all) => all.includes(parameter));
  if (line >= 0) goTo(chosen.program, line, parameter < 0 ? undefined : parameter);
  $("find").setCustomValidity(line >= 0 || !words ? "" : "No line moves or computes with a parameter or unit of this name.");
  $("find").reportValidity();
});

const again = () => { layOut(); draw(); showTrace(); };
new ResizeObserver(again).observe(canvas.parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
addEventListener("hashchange", openLink);
document.querySelectorAll(".all").forEach((button) => { button.onclick = () => { $("waiting").checked = true; showTable(); table.scrollIntoView(); }; });
layOut();
choose(0, -1);
openLink();
