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
const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let value = bytes, power = 0;
  for (; value >= 999.5 && power < 5; power++) value /= 1024;
  return power ? `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${units[power]}` : `${bytes} B`;
};
const duration = (seconds) => {
  for (const [unit, scale] of [["s", 1], ["ms", 1e3], ["us", 1e6], ["ns", 1e9]])
    if (seconds * scale >= 0.9995) return `${Number((seconds * scale).toPrecision(3))} ${unit}`;
  return "0 s";
};
const moment = (seconds) => (whole >= 1 ? `${seconds.toFixed(6)} s` : `${(seconds * 1e3).toFixed(whole >= 1e-3 ? 3 : 6)} ms`);
const share = (part) => `${Math.floor(part * 100)}%`;
const nameOfColour = (unit) => `u${unit <= 0 ? -1 : (unit - 1) % 8}`;
const unitColour = (unit) => `var(--${nameOfColour(unit)})`;
const KINDS = {
  "parameters at rest": "#5f7fa8", "buffers of the module": "#8ea3bd", "optimizer state": "#a9bad0", "inputs": "#c5ccd5",
  "gathered parameters": "#46aaa3", "saved for backward": "#e6b04f", "full gradients": "#d2605f",
  "reduced gradients": "#e5a2a0", "deferred gradients": "#bd82ad", "buffers of collectives": "#9783d0",
  "outputs and loss": "#9fb45f", "workspaces": "#8b8b8b", "temporaries": "#c4bcae",
};
const NAMES = { gather: "gathers", reduce: "reductions", tensor: "of slices" };
const title = (lane, program) => {
  const [kind, wire] = lane.split(" ");
  if (!wire) return NAMES[lane] ?? lane;
  const both = new Set(program.lanes.map((lane) => lane.split(" ")[1])).size > 2;
  return `${NAMES[kind]}${both ? `, ${wire}` : ""}`;
};

// Inverse tables of the columns of each program.
for (const program of page.programs) {
  const { lines, memory } = program;
  program.count = lines.code.length;
  program.collectiveOf = new Map();
  program.collectives.forEach((collective, index) => [collective.launch, collective.wait].forEach((line) => program.collectiveOf.set(line, index)));
  program.rows = [];
  let phase = "", origin = 0;
  for (let line = 0; line < program.count; line++) {
    if (lines.phase[line] !== phase) program.rows.push({ text: lines.phase[line], phase: true });
    if (lines.origin[line] && lines.origin[line] !== origin) program.rows.push({ text: `# ${lines.origins[lines.origin[line]]}` });
    phase = lines.phase[line];
    origin = lines.origin[line] || origin;
    program.rows.push({ line });
  }
  program.rowOf = new Map(program.rows.map((row, index) => [row.line, index]));
  program.highest = Math.max(0, ...(memory ? [memory.peak.bytes, program.figures.optimizer_step_bytes ?? 0] : []));
  if (memory) {
    program.alive = memory.kinds.map(() => new Float64Array(program.count));
    for (const [line, kind, bytes] of memory.changes) program.alive[kind][line] += bytes;
    for (const alive of program.alive) for (let line = 1; line < program.count; line++) alive[line] += alive[line - 1];
  }
}

// The state: the selected program, line and parameter, and the visible range of seconds.
const whole = Math.max(...page.programs.map((program) => program.figures.step_seconds)) || 1;
const view = { start: 0, end: whole };
const chosen = { program: 0, line: -1, parameter: -1 };
const current = () => page.programs[chosen.program];

function choose(program, line, { parameter, zoom = false } = {}) {
  Object.assign(chosen, { program, line });
  const { lines, collectiveOf, collectives } = current();
  const parameters = line < 0 ? [] : lines.params[line];
  chosen.parameter = parameter ?? (parameters.includes(chosen.parameter) ? chosen.parameter : largest(parameters));
  if (zoom && line >= 0) zoomTo(line);
  else if (line >= 0 && (lines.end[line] < view.start || lines.start[line] > view.end)) pan(lines.end[line] - (view.start + view.end) / 2);
  showWhich();
  showChosen();
  showTrace(true);
  markTable();
  draw();
  if (line < 0) return;
  const place = lines.ops[line].length ? `op=${lines.ops[line][0]}` : `line=${line}`;
  const link = `#${program ? `program=${program}&` : ""}${place}`;
  if (link !== location.hash) history[zoom ? "pushState" : "replaceState"](null, "", link); // Back returns to the last jump
  const collective = collectives[collectiveOf.get(line)];
  $("said").textContent = `${place}, ${lines.kind[line] ?? lines.phase[line]} ${lines.label[line]}: ${lines.code[line]}${collective?.why_exposed ? `; compute waits: ${collective.why_exposed}` : ""}`;
}

const largest = (parameters) => parameters.reduce((most, item) => (most < 0 || current().parameters[item].elements > current().parameters[most].elements ? item : most), -1);
// Scroll the selected line or its panel into view, after a selection outside the picture.
function reveal() {
  const place = $(innerWidth > 60 * parseFloat(getComputedStyle(document.documentElement).fontSize) ? "step-title" : "chosen-title"), { top } = place.getBoundingClientRect();
  if (top < 0 || top > innerHeight / 2) place.scrollIntoView();
}

function openLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const program = Math.min(Number(link.get("program") ?? 0), page.programs.length - 1) || 0;
  const line = link.has("op") ? page.programs[program].lines.ops.findIndex((ops) => ops.includes(Number(link.get("op")))) : link.has("line") ? Number(link.get("line")) : undefined;
  if (line >= 0 && line < page.programs[program].count) { choose(program, line, { zoom: true }); reveal(); }
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
  $("tip").hidden = true;
  drawSoon();
}
const pan = (seconds) => show(view.start + seconds, view.end - view.start);
function zoomTo(line) {
  const { lines, collectiveOf, collectives } = current(), collective = collectives[collectiveOf.get(line)];
  const start = collective ? collective.launched : lines.start[line], end = collective ? lines.end[collective.wait] : lines.end[line];
  const length = Math.min(whole, Math.max((end - start) * 3, whole / 40));
  show((start + end - length) / 2, length);
}
const x = (seconds) => gutter + ((seconds - view.start) / (view.end - view.start)) * (width - gutter);
const secondsAt = (place) => view.start + ((place - gutter) / (width - gutter)) * (view.end - view.start);

function layOut() {
  const style = getComputedStyle(document.documentElement), em = parseFloat(style.fontSize);
  text = 0.75 * em;
  width = canvas.clientWidth;
  gutter = Math.min(7.2 * em, width * 0.2);
  for (const name of ["ink", "quiet", "panel", "line", "chosen", "shade", "warn", ...[-1, 0, 1, 2, 3, 4, 5, 6, 7].map((unit) => `u${unit}`)])
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  let y = 1.4 * em;
  areas = page.programs.map((program) => {
    const top = y, lanes = [];
    y += page.programs.length > 1 ? 1.4 * em : 0;
    const phases = y, units = (y += 1.2 * em);
    y += 1.35 * em;
    program.lanes.forEach(() => { lanes.push(y); y += 1.75 * em; });
    const memory = y + 0.3 * em, height = program.memory ? (page.programs.length > 1 ? 8.5 : 11) * em : 0;
    y = memory + height + 1.1 * em;
    return { top, phases, units, lanes, lane: 1.55 * em, memory, height, bottom: memory + height };
  });
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${y}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(y * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
}

const hatches = {};
function hatch(colour) {
  if (hatches[colour]) return hatches[colour];
  const tile = make("canvas", { width: 8, height: 8 }), brush = tile.getContext("2d");
  brush.strokeStyle = colour;
  brush.lineWidth = 1.6;
  for (const shift of [-8, 0, 8]) { brush.moveTo(shift, 8); brush.lineTo(shift + 8, 0); }
  brush.stroke();
  return (hatches[colour] = pen.createPattern(tile, "repeat"));
}
const widths = new Map(); // measuring text is slow
function widthOf(words, weight = 400) {
  const font = `${weight} ${text}px system-ui, sans-serif`, key = font + words;
  pen.font = font;
  if (!widths.has(key)) widths.set(key, pen.measureText(words).width);
  return widths.get(key);
}
function write(words, left, y, { colour = colours.ink, align = "left", bold = false, room = Infinity } = {}) {
  const weight = bold ? 600 : 400, full = widthOf(words, weight);
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.textBaseline = "middle";
  if (full > room) words = `${words.slice(0, Math.max(0, Math.floor((words.length * room) / full) - 1))}…`;
  if (words.length > (room === Infinity ? 0 : 1) || /^\d$/.test(words)) pen.fillText(words, left, y);
}
function shortened(words, room, unit = words) {
  if (widthOf(words) <= room || (unit !== words && room > 7 * text)) return words;
  const last = unit.split(".").at(-1);
  return widthOf(last) <= room ? last : "";
}
function rectangle(start, end, y, height, fill) {
  const left = Math.max(gutter, x(start)), right = Math.min(width, Math.max(x(end), left + 0.7));
  if (right <= gutter || left >= width) return null;
  pen.fillStyle = fill;
  pen.fillRect(left, y, right - left, height);
  return { left, right };
}

let waits = false; // draw once for all moves within a frame
function drawSoon() {
  if (!waits) requestAnimationFrame(() => { waits = false; draw(); });
  waits = true;
}
function draw() {
  if (!areas.length) return;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  drawAxis();
  page.programs.forEach((program, index) => {
    const area = areas[index];
    if (page.programs.length > 1) write(program.name, 0, area.top + 0.8 * text, { bold: true, colour: index === chosen.program ? colours.chosen : colours.ink });
    drawPhases(program, area);
    drawLanes(program, area);
    if (program.memory) drawMemory(program, area);
    if (index === chosen.program && chosen.line >= 0) drawChosen(program, area);
  });
}
function drawAxis() {
  const rough = (view.end - view.start) / Math.max(3, (width - gutter) / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((candidate) => candidate >= rough);
  for (let tick = Math.ceil(view.start / step) * step; tick <= view.end; tick += step) {
    pen.fillStyle = colours.line;
    pen.fillRect(x(tick), text * 1.4, 1, canvas.clientHeight);
    const [unit, scale] = view.end >= 1 ? ["s", 1] : view.end >= 1e-3 ? ["ms", 1e3] : ["us", 1e6];
    write(`${(tick * scale).toFixed(Math.max(0, -Math.floor(Math.log10(step * scale * 1.001))))} ${unit}`, x(tick), text * 0.7, { colour: colours.quiet, align: x(tick) > width - 3 * text ? "right" : x(tick) < gutter + 2 * text ? "left" : "center" });
  }
}
function drawPhases(program, area) {
  for (const phase of program.phases) {
    const left = x(phase.start), right = Math.min(x(phase.end), width);
    if (left >= gutter && left <= width) { pen.fillStyle = colours.ink; pen.fillRect(left, area.phases, 1.5, area.bottom - area.phases); }
    if (right - gutter > 2 * text && width - left > 2 * text && right - left > 3 * text) write(phase.name, Math.max(left, gutter) + 4, area.phases + 0.8 * text, { bold: true, room: right - Math.max(left, gutter) - 6 });
  }
  write("units", 0, area.units + 0.75 * text, { colour: colours.quiet });
  for (const [unit, first, last] of program.runs) {
    const box = rectangle(program.lines.start[first], program.lines.end[last], area.units, 1.5 * text, colours[nameOfColour(unit)]);
    if (box && box.right - box.left > 1.2 * text) write(shortened(program.units[unit] || "root", box.right - box.left - 4), box.left + 2, area.units + 0.8 * text, { colour: "#14181d", room: box.right - box.left - 4 });
  }
}
function drawLanes(program, area) {
  const { bars, lines } = program, last = program.lanes.map(() => -9);
  program.lanes.forEach((lane, index) => write(title(lane, program), 0, area.lanes[index] + area.lane / 2, { room: gutter - 6 }));
  for (let index = 0; index < bars.line.length; index++) {
    if (bars.end[index] < view.start || bars.start[index] > view.end) continue;
    const lane = bars.lane[index], y = area.lanes[lane], right = x(bars.end[index]), wide = right - x(bars.start[index]);
    if (wide < 1 && Math.floor(right) === last[lane]) continue;
    last[lane] = Math.floor(right);
    const unit = lines.unit[bars.line[index]], colour = colours[nameOfColour(unit)];
    if (bars.waits[index]) rectangle(bars.start[index], bars.end[index], area.lanes[0], area.lanes.at(-1) + area.lane - area.lanes[0], colours.shade);
    const seen = rectangle(bars.start[index], bars.end[index], y, area.lane, bars.waits[index] ? hatch(colours.warn) : colour);
    if (seen && seen.right - seen.left > 6) { pen.strokeStyle = colours.panel; pen.lineWidth = 1; pen.strokeRect(seen.left, y, seen.right - seen.left, area.lane); }
    if (!seen || seen.right - seen.left < (bars.waits[index] ? 3.4 : 1.2) * text) continue;
    const named = lines.label[bars.line[index]] || program.units[unit] || lines.phase[bars.line[index]];
    const words = bars.waits[index] ? "waits" : shortened(named, seen.right - seen.left - 7, program.units[unit] || "root");
    if (bars.waits[index]) rectangle(secondsAt(seen.left + 3), secondsAt(seen.left + 3 + Math.min(2.7 * text, seen.right - seen.left - 6)), y + 0.3 * text, area.lane - 0.6 * text, colours.panel);
    write(words, seen.left + 4, y + area.lane / 2, { colour: bars.waits[index] ? colours.warn : "#14181d", room: seen.right - seen.left - 7 });
  }
}
const mostBytes = () => Math.max(...page.programs.map((program) => program.highest)) * 1.06 || 1;
const bytesOf = ({ memory, alive }, kind, line) => (line < 0 ? 0 : line === memory.peak.line ? memory.peak.by_kind[memory.kinds[kind]] ?? 0 : alive[kind][line]);
function seenLines(program) {
  const columns = Math.max(1, Math.floor(width - gutter)), seen = new Int32Array(columns).fill(-1), { end, highest } = program.lines;
  for (let line = 0, before = 0; line < program.count; before = end[line++]) {
    const from = Math.max(0, Math.floor(x(before) - gutter)), to = Math.min(columns - 1, Math.floor(x(end[line]) - gutter));
    for (let column = from; column <= to; column++) if (seen[column] < 0 || highest[line] > highest[seen[column]]) seen[column] = line;
  }
  return seen;
}
function drawMemory(program, area) {
  const { memory, lines } = program, most = mostBytes();
  const seen = (program.seen = seenLines(program)), base = new Float64Array(seen.length).fill(memory.reserve);
  const y = (bytes) => area.bottom - (bytes / most) * area.height;
  for (const share of [0, 0.5, 1]) {
    pen.fillStyle = colours.line;
    pen.fillRect(gutter, y(most * share), width - gutter, 1);
    write(size(Math.round(most * share)), gutter - 6, y(most * share) + (share === 1 ? 0.5 : share ? 0 : -0.3) * text, { colour: colours.quiet, align: "right" });
  }
  write("memory", 0, area.memory + text * 2, { room: gutter - 6 });
  memory.kinds.forEach((kind, number) => {
    pen.beginPath();
    pen.moveTo(gutter, y(base[0]));
    for (let column = 0; column < seen.length; column++) pen.lineTo(gutter + column, y(base[column]));
    for (let column = seen.length - 1; column >= 0; column--) pen.lineTo(gutter + column, y((base[column] += bytesOf(program, number, seen[column]))));
    pen.fillStyle = KINDS[kind];
    pen.fill();
  });
  pen.fillStyle = hatch(colours.quiet);
  seen.forEach((line, column) => line >= 0 && lines.highest[line] > base[column] && pen.fillRect(gutter + column, y(lines.highest[line]), 1, y(base[column]) - y(lines.highest[line])));
  pen.strokeStyle = colours.ink;
  pen.lineWidth = 1;
  pen.beginPath();
  seen.forEach((line, column) => line >= 0 && lines.highest[line] !== null && pen.lineTo(gutter + column, y(lines.highest[line])));
  pen.stroke();
  if (memory.capacity < most) {
    pen.setLineDash([8, 4]);
    pen.strokeRect(gutter, y(memory.capacity), width - gutter, 0);
    pen.setLineDash([]);
    writeOn(`${program.device} has ${size(memory.capacity)}`, gutter + 4, y(memory.capacity) - 1.2 * text, colours.ink);
  }
  const peak = x(lines.end[memory.peak.line]);
  if (peak < gutter || peak > width) return;
  pen.setLineDash([4, 3]);
  pen.strokeStyle = colours.warn;
  pen.lineWidth = 1.5;
  pen.strokeRect(peak, area.phases + 1.5 * text, 0, area.bottom - area.phases - 1.5 * text);
  pen.setLineDash([]);
  pen.fillStyle = colours.warn;
  pen.beginPath();
  pen.arc(peak, y(memory.peak.bytes), 4, 0, 7);
  pen.fill();
  const words = `peak ${size(memory.peak.bytes)}`;
  const wide = widthOf(words, 600) + 8, left = peak + wide + 8 > width ? peak - wide - 6 : peak + 6;
  writeOn(words, left, y(memory.peak.bytes) - 0.2 * text, colours.warn);
}
// Bold words on a plate, so that the curve does not run through them.
function writeOn(words, left, top, colour) {
  pen.fillStyle = colours.panel;
  pen.fillRect(left, top, widthOf(words, 600) + 8, 1.4 * text);
  write(words, left + 4, top + 0.75 * text, { colour, bold: true });
}
function drawChosen(program, area) {
  const collective = program.collectives[program.collectiveOf.get(chosen.line)], related = collective ? [collective.launch, collective.wait] : [chosen.line];
  const frame = (bar, colour, thick) => {
    const left = Math.max(gutter, x(program.bars.start[bar])), right = Math.min(width, x(program.bars.end[bar]));
    if (right < gutter || left > width) return;
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    pen.strokeRect(left, area.lanes[program.bars.lane[bar]], Math.max(1, right - left), area.lane);
  };
  program.bars.line.forEach((line, bar) => chosen.parameter >= 0 && program.lines.params[line].includes(chosen.parameter) && frame(bar, colours.ink, 1.5));
  program.bars.line.forEach((line, bar) => related.includes(line) && frame(bar, colours.chosen, 3));
  const left = x(program.lines.end[chosen.line]);
  if (left < gutter || left > width) return;
  pen.fillStyle = colours.chosen;
  pen.fillRect(left - 1, area.units, 2, area.bottom - area.units);
  pen.beginPath();
  pen.moveTo(left - 5, area.units - 5);
  pen.lineTo(left + 5, area.units - 5);
  pen.lineTo(left, area.units + 2);
  pen.fill();
}
function hit(event) {
  const box = canvas.getBoundingClientRect(), left = event.clientX - box.left, top = event.clientY - box.top;
  const index = areas.findIndex((area) => top >= area.top && top <= area.bottom), area = areas[index], program = page.programs[index];
  if (index < 0 || left < gutter) return null;
  const lane = area.lanes.findIndex((y) => top >= y && top <= y + area.lane), { bars } = program;
  if (lane >= 0) {
    let best = -1, nearest = 3;
    for (let bar = 0; bar < bars.line.length; bar++) {
      if (bars.lane[bar] !== lane) continue;
      const away = Math.max(x(bars.start[bar]) - left, left - x(bars.end[bar]), 0);
      if (away < nearest) [best, nearest] = [bar, away];
    }
    return best < 0 ? null : { program: index, line: bars.line[best], bar: best };
  }
  if (top >= area.units && top < area.lanes[0]) {
    const run = program.runs.find(([, first, last]) => secondsAt(left) >= program.lines.start[first] && secondsAt(left) <= program.lines.end[last]);
    return run ? { program: index, line: run[1] } : null;
  }
  const line = top >= area.memory && program.seen ? program.seen[Math.floor(left - gutter)] ?? -1 : -1;
  return line < 0 ? null : { program: index, line, bytes: ((area.bottom - top) / area.height) * mostBytes() };
}
function tell(event) {
  const target = hit(event), tip = $("tip");
  tip.hidden = !target;
  if (!target) return;
  const program = page.programs[target.program], { lines, bars } = program, line = target.line;
  const parts = [`${lines.kind[line] ?? lines.phase[line]} ${lines.label[line] || program.units[lines.unit[line]] || ""}`.trim()];
  if (target.bar !== undefined) parts.push(`${bars.waits[target.bar] ? "compute waits" : title(program.lanes[bars.lane[target.bar]], program)} ${duration(bars.end[target.bar] - bars.start[target.bar])}`);
  if (target.bytes !== undefined) {
    let below = program.memory.reserve;
    const kind = program.memory.kinds.findIndex((_, number) => (below += bytesOf(program, number, line)) > target.bytes);
    if (kind >= 0) parts.push(`${program.memory.kinds[kind]} ${size(bytesOf(program, kind, line))}`);
  }
  if (lines.highest[line] !== null) parts.push(lines.highest[line] > lines.alive[line] ? `${size(lines.highest[line])} while it runs, ${size(lines.alive[line])} after it` : `${size(lines.alive[line])} alive`);
  tip.textContent = parts.join("\n");
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}
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
canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; });
canvas.addEventListener("wheel", (event) => {
  const length = view.end - view.start;
  if (event.deltaY > 0 && length >= whole && !event.shiftKey) return; // fully zoomed out: let the page scroll
  event.preventDefault();
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(((event.deltaX || event.deltaY) / width) * length);
  else zoomBy(1.002 ** event.deltaY, secondsAt(event.clientX - canvas.getBoundingClientRect().left));
}, { passive: false });
function step(by) {
  const line = chosen.line < 0 ? 0 : Math.max(0, Math.min(current().count - 1, chosen.line + by));
  choose(chosen.program, line);
}
const KEYS = {
  "+": () => zoomBy(0.6), "=": () => zoomBy(0.6), "-": () => zoomBy(1 / 0.6), "0": fit, Home: fit,
  ArrowLeft: () => pan(-(view.end - view.start) / 6), ArrowRight: () => pan((view.end - view.start) / 6),
  ArrowDown: () => step(1), ArrowUp: () => step(-1), PageDown: () => step(20), PageUp: () => step(-20),
  Enter: () => chosen.line >= 0 && choose(chosen.program, chosen.line, { zoom: true }), Escape: () => choose(chosen.program, -1),
};
function fit() { show(0, whole); }
for (const target of [canvas, $("trace")])
  target.addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });
addEventListener("keydown", (event) => {
  if (!"+=-0".includes(event.key) && event.key !== "Escape") return;
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || event.target.closest("input, select")) return;
  KEYS[event.key]();
});
$("in").onclick = KEYS["+"];
$("out").onclick = KEYS["-"];
$("fit").onclick = fit;

// The lines.
const trace = $("trace"), rows = $("rows");
let rowHeight = 20;
function showTrace(scroll = false) {
  const program = current(), { lines } = program, collective = program.collectives[program.collectiveOf.get(chosen.line)];
  rowHeight = 1.4 * parseFloat(getComputedStyle(document.documentElement).fontSize);
  rows.style.height = `${program.rows.length * rowHeight}px`;
  if (scroll && chosen.line >= 0) {
    const top = program.rowOf.get(chosen.line) * rowHeight;
    if (top < trace.scrollTop || top > trace.scrollTop + trace.clientHeight - 2 * rowHeight) trace.scrollTop = top - trace.clientHeight / 3;
  }
  const first = Math.max(0, Math.floor(trace.scrollTop / rowHeight) - 4), count = Math.ceil(trace.clientHeight / rowHeight) + 8;
  rows.replaceChildren(...program.rows.slice(first, first + count).map((row, index) => {
    const style = `top: ${(first + index) * rowHeight}px;`;
    if (row.line === undefined) return make("div", { className: `row text ${row.phase ? "phase" : ""}`, style, title: row.text }, row.text);
    const line = row.line, isPeak = program.memory?.peak.line === line, isChosen = line === chosen.line;
    const related = (collective && (line === collective.launch || line === collective.wait)) || (chosen.parameter >= 0 && lines.params[line].includes(chosen.parameter));
    return make("div", { className: `row ${isChosen ? "is" : related ? "of" : ""}`, id: `line-${line}`, role: "option", ariaSelected: String(isChosen), title: lines.code[line], style: `${style} border-color: ${unitColour(lines.unit[line])}`, onclick: () => choose(chosen.program, line) },
      make("span", {}, String(lines.ops[line][0] ?? "")), make("span", {}, lines.code[line]), make("span", {}, lines.kind[line] ?? ""), make("span", {}, lines.label[line]),
      make("span", {}, lines.sent[line] === null ? "" : size(lines.sent[line])),
      make("span", { className: isPeak ? "peak" : "" }, isPeak ? "▲ peak" : lines.alive[line] === null ? "" : size(lines.alive[line])));
  }));
  trace.setAttribute("aria-activedescendant", chosen.line < 0 ? "" : `line-${chosen.line}`);
}
trace.addEventListener("scroll", () => showTrace());

// The selection.
const place = ({ lines }, line) => (lines.ops[line].length ? `op ${lines.ops[line][0]}` : lines.phase[line]);
const jump = (words, line) => make("button", { className: "link", type: "button", onclick: () => { choose(chosen.program, line, { zoom: true }); reveal(); } }, words);
const swatch = (colour) => make("span", { className: "swatch", style: `background: ${colour}` });
function facts(pairs) {
  return make("dl", {}, ...pairs.filter(([, value]) => value !== null && value !== "").flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, ...[value].flat())]));
}
function tensorsAt(program, line) {
  const { tensors, peak } = program.memory, alive = [];
  if (line === peak.line) return peak.tensors;
  tensors.made.forEach((first, index) => { if (first <= line && (tensors.freed[index] === null || tensors.freed[index] > line)) alive.push(index); });
  return alive.sort((first, second) => tensors.bytes[second] - tensors.bytes[first]);
}
function tensorList(program, line, most) {
  const { tensors, kinds } = program.memory, alive = tensorsAt(program, line);
  const items = alive.slice(0, most).map((index) => make("li", {}, make("b", {}, size(tensors.bytes[index])), make("span", {}, swatch(KINDS[kinds[tensors.kind[index]]]), `${kinds[tensors.kind[index]]}: `, tensors.made[index] < 0 ? tensors.name[index] : jump(tensors.name[index] || place(program, tensors.made[index]), tensors.made[index]))));
  if (alive.length > most) items.push(make("li", {}, make("b", {}), make("span", {}, `and ${alive.length - most} smaller tensors`)));
  return make("ul", {}, ...items);
}
function showChosen() {
  const program = current(), { lines } = program, line = chosen.line, panel = $("chosen");
  if (line < 0) return panel.replaceChildren(make("p", { className: "note" }, "Select a line, a bar, a moment of the memory curve or a collective: all of them show it."));
  const collective = program.collectives[program.collectiveOf.get(line)], waited = lines.start[line] < lines.end[line] && ["wait", "tensor"].includes(lines.kind[line]);
  const origin = lines.origins[lines.origin[line]];
  panel.replaceChildren(
    make("div", { className: "says" }, lines.code[line]),
    facts([
      ["place", [`${lines.phase[line]}, `, make("a", { href: location.pathname.split("/").pop() + location.hash }, lines.ops[line].length ? `op ${lines.ops[line].join(", ")}` : `line ${line}`)]],
      ["does", [lines.kind[line] ?? lines.phase[line], lines.label[line] ? ` ${lines.label[line]}` : ""].join("")],
      ["unit", lines.unit[line] < 0 ? "" : [swatch(unitColour(lines.unit[line])), program.units[lines.unit[line]] || "root unit"]],
      ["from", origin],
      ["time", lines.start[line] === lines.end[line] ? `at ${moment(lines.end[line])}; takes no time of its own` : `${moment(lines.start[line])} to ${moment(lines.end[line])}: ${waited ? "compute waits " : ""}${duration(lines.end[line] - lines.start[line])}`],
      ...(collective ? [["on the wire", `${duration(collective.wire_seconds)}, ${size(collective.sent_bytes)} sent by this rank`],
        ["hidden", collective.exposed_seconds ? `${share(collective.hidden_share)}: compute waits ${duration(collective.exposed_seconds)}: ${collective.why_exposed}` : "all of it"],
        ["why there", collective.why], ["links", [jump("launch", collective.launch), " · ", jump("wait", collective.wait)]]] : []),
      ["alive", lines.alive[line] === null ? "" : `${size(lines.alive[line])} after it, ${size(lines.highest[line])} at most while it runs`],
    ]),
  );
  const parameters = lines.params[line];
  if (parameters.length) {
    const pick = make("select", { ariaLabel: "Parameter", onchange: () => choose(chosen.program, line, { parameter: Number(pick.value) }) },
      ...parameters.map((parameter) => make("option", { value: parameter, selected: parameter === chosen.parameter }, program.parameters[parameter].path)));
    panel.append(make("h2", {}, "Its parameter ", pick),
      make("div", { className: "says", id: "explained" }, ...program.parameters[chosen.parameter].explained.split("\n").map((row) => make("div", {}, row || " "))));
  }
  if (program.memory) panel.append(make("h2", {}, "Alive here, the largest"), tensorList(program, line, 12));
}

// The collectives.
const COLUMNS = [
  ["unit", (collective) => collective.unit || "root unit", "text"], ["kind", (collective) => `${collective.kind}, ${collective.backward ? "backward" : "forward"}`, "text"],
  ["parameters", (collective) => collective.label, "text"], ["sent", (collective) => collective.sent_bytes, size], ["launch", (collective) => collective.launched, duration],
  ["wait", (collective) => collective.waited, duration], ["on the wire", (collective) => collective.wire_seconds, duration],
  ["compute waits", (collective) => collective.exposed_seconds, duration], ["hidden", (collective) => collective.hidden_share, share],
  ["why it stands there; why compute waits", (collective) => collective.why + (collective.why_exposed ? `. Compute waits: ${collective.why_exposed}` : ""), "text"],
];
const order = { column: -1, down: false };
$("table").tHead.rows[0].append(...COLUMNS.map(([name, , how], column) => make("th", { scope: "col", className: how === "text" ? "text" : "" },
  make("button", { type: "button", onclick: () => { Object.assign(order, { down: order.column === column ? !order.down : how !== "text", column }); showTable(); } }, name))));
function showTable() {
  const program = current(), words = $("filter").value.toLowerCase();
  let rows = program.collectives.map((collective, index) => [collective, index]).filter(([collective]) => (!$("of").value || collective.kind === $("of").value) && (!$("waiting").checked || collective.exposed_seconds)
    && (!words || COLUMNS.some(([, value, how]) => how === "text" && String(value(collective)).toLowerCase().includes(words))));
  if (order.column >= 0) {
    const [, value] = COLUMNS[order.column], way = order.down ? -1 : 1;
    rows = rows.sort(([first], [second]) => way * (value(first) > value(second) ? 1 : value(first) < value(second) ? -1 : 0));
  }
  [...$("table").tHead.rows[0].cells].forEach((cell, column) => {
    cell.ariaSort = column === order.column ? (order.down ? "descending" : "ascending") : "none";
    cell.firstChild.textContent = COLUMNS[column][0] + (column === order.column ? (order.down ? " ▼" : " ▲") : "");
  });
  $("count").textContent = `${rows.length} of ${program.collectives.length}`;
  $("table").tBodies[0].replaceChildren(...rows.map(([collective, index]) => make("tr", { place: index, onclick: () => choose(chosen.program, collective.launch, { zoom: true }) },
    ...COLUMNS.map(([name, value, how]) => make("td", { className: `${how === "text" ? "text" : ""} ${name === "compute waits" && collective.exposed_seconds ? "peak" : ""}` },
      name === "unit" ? swatch(unitColour(program.units.indexOf(collective.unit))) : "", how === "text" ? value(collective) : how(value(collective)))))));
  markTable();
}
function markTable() {
  const now = current().collectiveOf.get(chosen.line), all = [...$("table").tBodies[0].rows], has = all.some((row) => row.place === now);
  all.forEach((row, number) => Object.assign(row, { className: row.place === now ? "is" : "", tabIndex: (has ? row.place === now : !number) ? 0 : -1, ariaSelected: String(row.place === now) }));
}
for (const [id, event] of [["filter", "input"], ["of", "change"], ["waiting", "change"]]) $(id).addEventListener(event, showTable);
$("table").tBodies[0].addEventListener("keydown", (event) => {
  const row = event.target.closest("tr"), next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
  if (!next && event.key !== "Enter") return;
  event.preventDefault();
  if (next) next.focus();
  else row.click();
});

// The overview.
function showGlance() {
  const program = current(), { memory, lines } = program;
  if (memory) {
    const most = Object.entries(memory.peak.by_kind), line = memory.peak.line;
    $("peak").replaceChildren(
      make("p", { className: "note" }, `${size(memory.peak.bytes)} in ${lines.phase[line]}, at `, jump(place(program, line), line), program.left_out.length ? `; left out: ${program.left_out.map((reason) => reason.replace("left out: ", "")).join("; ")}` : ""),
      make("div", { className: "stack", role: "img", ariaLabel: "Shares of the kinds" }, ...most.map(([kind, bytes]) => make("i", { title: kind, style: `flex: ${bytes} 0 0; background: ${KINDS[kind]}` }))),
      make("ul", {}, ...most.map(([kind, bytes]) => make("li", {}, make("b", {}, size(bytes)), make("span", {}, swatch(KINDS[kind]), kind)))),
      make("p", { className: "note" }, "The largest tensors:"), tensorList(program, line, 4));
    $("kinds").replaceChildren(...memory.kinds.map((kind) => make("li", {}, swatch(KINDS[kind]), kind)), make("li", {}, make("span", { className: "swatch within" }), "only while a line runs"));
  } else $("peak").replaceChildren(make("p", {}, program.note));
  document.querySelectorAll("#exposed > div").forEach((part, index) => { part.hidden = index !== chosen.program; });
}
function showWhich() {
  $("which").replaceChildren(...(page.programs.length < 2 ? [] : page.programs.map((program, index) => make("button", { type: "button", ariaPressed: String(index === chosen.program), onclick: () => choose(index, -1) }, program.name))));
  if (chosen.glance === chosen.program) return;
  chosen.glance = chosen.program;
  showGlance();
  showTable();
}
$("names").append(...[...page.programs[0].units.filter(Boolean), ...page.programs[0].parameters.map((parameter) => parameter.path)].map((value) => make("option", { value })));
$("find").addEventListener("input", () => $("find").setCustomValidity(""));
$("find").addEventListener("change", () => {
  const program = current(), words = $("find").value.trim().toLowerCase(), paths = program.parameters.map((parameter) => parameter.path.toLowerCase());
  const unit = program.units.findIndex((name) => name && name.toLowerCase() === words);
  const parameter = unit >= 0 ? -1 : paths.includes(words) ? paths.indexOf(words) : paths.findIndex((path) => path.includes(words));
  const line = words ? program.lines.params.findIndex((parameters, index) => (parameter >= 0 ? parameters.includes(parameter) : unit >= 0 && program.lines.unit[index] === unit)) : -1;
  if (line >= 0) { choose(chosen.program, line, { parameter: parameter < 0 ? undefined : parameter, zoom: true }); reveal(); }
  $("find").setCustomValidity(line >= 0 || !words ? "" : "No line moves or computes with a parameter or unit of this name.");
  $("find").reportValidity();
});

const again = () => { Object.keys(hatches).forEach((key) => delete hatches[key]); layOut(); draw(); showTrace(); };
new ResizeObserver(again).observe(canvas.parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
addEventListener("hashchange", openLink);
document.querySelectorAll(".all").forEach((button) => { button.onclick = () => { $("waiting").checked = true; $("of").value = ""; showTable(); $("table").scrollIntoView(); }; });
layOut();
choose(0, -1);
openLink();
