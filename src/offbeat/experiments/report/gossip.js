// Gossip: every worker's gradients and exchanges, partners joined; and how often each pair met.

const PAIR = { row: 26, strip: 9, head: 24, foot: 28 };

// An exchange as an object; ends by worker.
function exchangeOf([i, j, fromI, toI, fromJ, toJ, size]) {
  return { i, j, size, at: new Map([[i, [fromI, toI]], [j, [fromJ, toJ]]]) };
}

const gossips = (data.gossip || []).map((g) => g && Object.fromEntries(PANELS.filter((p) => g[p]).map((panel) => [
  panel, { ...g[panel], exchanges: g[panel].exchanges.map(exchangeOf) },
])));

function describeExchange(panel, one) {
  const [from, to] = one.at.get(one.i);
  const lines = [`exchange of workers ${one.i} and ${one.j} · ${panel}`];
  lines.push(`starts at ${seconds(from)}, takes ${seconds(to - from)}`);
  lines.push(`${bytes(one.size)} in each direction${to > from ? `, ${bytes(Math.round(one.size / (to - from)))}/s` : ""}`);
  return lines.join("\n");
}

// Where panels and their workers are, from top to bottom.
function gossipLayout(gossip) {
  const panels = [];
  let y = 0;
  for (const [name, panel] of Object.entries(gossip)) {
    const top = y + PAIR.head;
    panels.push({ name, panel, y, rows: new Map(panel.workers.map((worker, n) => [worker, top + n * PAIR.row])) });
    y = top + panel.workers.length * PAIR.row + 6;
  }
  return { panels, height: y + PAIR.foot };
}

function strip(svg, look, [from, to], y, x, end, gap) {
  const left = Math.max(1, x(from)), right = Math.min(end, x(to));
  if (right < 1 || left > end) return;
  draw("rect", { class: look, x: left.toFixed(2), y, width: Math.max(1.5, right - left - gap).toFixed(2), height: PAIR.strip }, svg);
}

function drawWorkers(svg, { panel, rows }, x) {
  const end = x(panel.length_s);
  panel.workers.forEach((worker, n) => {
    const y = rows.get(worker);
    draw("rect", { class: "lane", x: 1, y, width: Math.max(0, end - 1), height: 2 * PAIR.strip + 2 }, svg);
    for (const span of panel.gradients[n]) strip(svg, "backward", span, y, x, end, 1);
  });
  for (const one of panel.exchanges)
    for (const worker of [one.i, one.j]) strip(svg, "param", one.at.get(worker), rows.get(worker) + PAIR.strip + 2, x, end, 1);
}

// A line from one partner's box to the other's; not always in the middle, as those of several pairs
// would cover each other.
function drawMeeting(svg, { panel, rows }, one, x) {
  const end = x(panel.length_s), share = (1 + (one.i % 5)) / 6;
  const points = [one.i, one.j].map((worker) => {
    const [from, to] = one.at.get(worker);
    return { cx: Math.min(end, Math.max(1, x(from + share * (to - from)))), cy: rows.get(worker) + 1.5 * PAIR.strip + 2 };
  });
  const group = draw("g", { class: "meets", "data-pair": `${one.i}-${one.j}` }, svg);
  const [a, b] = points;
  draw("path", { d: `M${a.cx.toFixed(2)} ${a.cy}L${b.cx.toFixed(2)} ${b.cy}` }, group);
  for (const p of points) draw("circle", { cx: p.cx.toFixed(2), cy: p.cy, r: 2 }, group);
  return { one, group, a, b };
}

function gossipNames(names, { panels, height }) {
  names.replaceChildren();
  names.style.height = `${height}px`;
  const place = (y, tall, className, text) => {
    const line = element("div", className, names);
    line.style.top = `${y}px`;
    line.style.height = `${tall}px`;
    element("span", "", line, text);
  };
  for (const { name, y, rows } of panels) {
    place(y, PAIR.head, "panel", name);
    for (const [worker, top] of rows) place(top, 2 * PAIR.strip + 2, "", `worker ${worker}`);
  }
}

function renderGossip(figure, gossip) {
  const names = figure.querySelector(".names"), scroll = figure.querySelector(".scroll");
  const width = Math.max(LEAST_WIDTH, scroll.clientWidth) * view.zoom;
  const domain = Math.max(1e-9, ...Object.values(gossip).map((panel) => panel.length_s));
  const laid = gossipLayout(gossip);
  const x = (time) => (time / domain) * (width - 2) + 1;
  const svg = draw("svg", { width, height: laid.height, tabindex: 0, role: "img", "aria-label": `${figure.getAttribute("aria-label")}. Arrow keys move from exchange to exchange.` });
  drawAxis(svg, domain, x, width, laid.height);
  const meetings = [];
  for (const part of laid.panels) {
    drawWorkers(svg, part, x);
    for (const one of part.panel.exchanges) meetings.push({ ...drawMeeting(svg, part, one, x), name: part.name });
    if (!part.panel.length_s) draw("text", { x: 8, y: part.y + PAIR.head - 8 }, svg, "exchanges of no common time were recorded");
  }
  gossipNames(names, laid);
  scroll.replaceChildren(svg);
  pointAtMeetings(svg, meetings);
}

// How far a point is from the line between two others.
function away(px, py, a, b) {
  const dx = b.cx - a.cx, dy = b.cy - a.cy;
  const t = Math.min(1, Math.max(0, ((px - a.cx) * dx + (py - a.cy) * dy) / (dx * dx + dy * dy || 1)));
  return Math.hypot(px - a.cx - t * dx, py - a.cy - t * dy);
}

function pointAtMeetings(svg, meetings) {
  let current = -1;
  const choose = (n, x, y) => {
    if (current >= 0) meetings[current].group.classList.remove("chosen");
    current = n;
    if (n < 0) return hideTip();
    meetings[n].group.classList.add("chosen");
    return showTip(describeExchange(meetings[n].name, meetings[n].one), x, y);
  };
  const point = (event) => {
    const outer = svg.getBoundingClientRect();
    const far = meetings.map(({ a, b }) => away(event.clientX - outer.left, event.clientY - outer.top, a, b));
    const nearest = Math.min(...far);
    choose(nearest < 8 ? far.indexOf(nearest) : -1, event.clientX, event.clientY);
  };
  const leave = () => choose(-1);
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !meetings.length) return undefined;
    event.preventDefault();
    const n = Math.min(meetings.length - 1, Math.max(0, current + by));
    const outer = meetings[n].group.getBoundingClientRect();
    return choose(n, outer.left, outer.bottom);
  });
}

// A square per pair, the fuller the more often it has met.
function drawMap(host, { workers, counts }) {
  const side = 34, cell = Math.max(4, Math.min(34, Math.floor((Math.max(240, host.clientWidth) - side) / workers.length)));
  const most = Math.max(1, ...counts.flat()), size = side + cell * workers.length;
  const svg = draw("svg", { width: size, height: size, role: "img", "aria-label": `How often each pair of ${workers.length} workers has exchanged, at most ${most} times` });
  const every = Math.ceil(20 / cell);
  workers.forEach((worker, n) => {
    if (n % every) return;
    const middle = side + (n + 0.5) * cell;
    draw("text", { x: middle, y: side - 8, "text-anchor": "middle" }, svg, String(worker));
    draw("text", { x: side - 8, y: middle + 4, "text-anchor": "end" }, svg, String(worker));
  });
  draw("rect", { class: "cell-ground", x: side, y: side, width: size - side, height: size - side }, svg);
  counts.forEach((row, n) => row.forEach((count, m) => drawCell(svg, count, most, { x: side + m * cell, y: side + n * cell, cell })));
  const point = (event) => {
    const outer = svg.getBoundingClientRect();
    const [m, n] = [event.clientX - outer.left, event.clientY - outer.top].map((v) => Math.floor((v - side) / cell));
    const count = n === m ? undefined : (counts[n] || [])[m];
    if (count === undefined) return hideTip();
    return showTip(`workers ${workers[n]} and ${workers[m]}: ${fixed(count, 0)} exchanges`, event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", hideTip);
  host.replaceChildren(svg);
}

function drawCell(svg, count, most, { x, y, cell }) {
  if (!count) return;
  const share = 0.15 + (0.85 * count) / most, text = String(count), gap = cell > 8 ? 1 : 0;
  draw("rect", { class: "cell", x, y, width: cell - gap, height: cell - gap, opacity: share.toFixed(3) }, svg);
  if (text.length * 6.2 + 6 > cell) return;
  const look = share > 0.6 ? "in-cell dark" : "in-cell";
  draw("text", { class: look, x: x + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle" }, svg, text);
}

function startGossip() {
  for (const figure of document.querySelectorAll("[data-gossip]")) {
    element("div", "names", figure);
    const scroll = element("div", "scroll", figure);
    const redraw = () => renderGossip(figure, gossips[Number(figure.dataset.gossip)]);
    onWidth(scroll, redraw);
    document.getElementById("controls").addEventListener("change", redraw);
  }
  for (const host of document.querySelectorAll("[data-map]"))
    onWidth(host, () => drawMap(host, gossips[Number(host.dataset.map)][host.dataset.panel]));
}

startGossip();
