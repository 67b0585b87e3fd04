// Timelines: one period of every strategy, predicted above measured, one lane per resource.

const KINDS = {
  forward: "forward", backward: "backward", update: "update", wait: "wait (blocked on communication)",
  other: "other", grad: "gradients", reduce_scatter: "reduce-scatter of gradients",
  all_gather: "all-gather of gradients", param: "parameters", state: "optimizer state",
  broadcast: "broadcast of buffers",
};
const PANELS = ["predicted", "measured"];
const HEAD = 26, LANE = 28, COMPACT = 7, FOOT = 28, LEAST_WIDTH = 420;
const view = { rank: "0", scale: "own", zoom: 1 };

// Spans of every rank from the packed rows: name, iteration, start since the last, duration.
// A span's generation is [first, stop, colour]: the iterations whose gradients it holds.
function unpack(packed) {
  if (!packed) return null;
  const unit = packed.unit_s;
  const generations = new Map(packed.generations.map((g) => [g[0], g]));
  const stored = packed.rows.map((flat) => {
    const spans = [];
    for (let i = 0, start = 0; i < flat.length; i += 4) {
      start += flat[i + 2];
      const [lane, kind, from, to, size, back, merged] = packed.names[flat[i]];
      const end = (start + flat[i + 3]) * unit, iteration = packed.first + flat[i + 1];
      const generation = merged ? generations.get(iteration - back) : null;
      const known = kind in KINDS ? kind : "other";
      const fill = lane && generation ? `g${generation[2]}` : known;
      spans.push({ lane, kind, known, fill, from, to, size, iteration, generation, start: start * unit, end });
    }
    return spans;
  });
  const ranks = new Map(packed.ranks.map((rank, i) => [
    rank, { spans: stored[packed.which[i]], bounds: packed.bounds[i].map((b) => b * unit) },
  ]));
  const messages = packed.names.some((name) => name[0] > 0);
  return { ranks, length: packed.length * unit, first: packed.first, alike: packed.stands_for_all, messages, generations: packed.generations };
}

// What a window holds of a rank; one simulated row stands for every rank if all are alike.
function ofRank(window, rank) {
  return window.ranks.get(window.alike ? 0 : rank);
}

const timelines = data.timelines.map((t) => ({
  lanes: t.lanes, predicted: unpack(t.predicted), measured: unpack(t.measured),
}));

function lengthOf(timeline) {
  return Math.max(...PANELS.map((panel) => (timeline[panel] ? timeline[panel].length : 0)));
}

const longest = Math.max(0, ...timelines.map(lengthOf));

function allRanks() {
  const found = new Set();
  for (const t of timelines)
    for (const panel of PANELS) if (t[panel]) for (const rank of t[panel].ranks.keys()) found.add(rank);
  return [...found].sort((a, b) => a - b);
}

function busyShare(spans, length) {
  let sum = 0;
  for (const s of spans)
    if (s.kind !== "wait") sum += Math.max(0, Math.min(s.end, length) - Math.max(s.start, 0));
  return Math.min(1, sum / length);
}

// Rows from top to bottom, with their place: a head per panel, then a lane per rank and resource.
function layout(timeline) {
  const rows = [];
  let y = 0;
  for (const panel of PANELS) {
    const window = timeline[panel];
    rows.push({ head: panel, window, y, height: HEAD });
    y += HEAD;
    const ranks = !window ? [] : view.rank === "all" ? [...window.ranks.keys()] : [Number(view.rank)];
    for (const rank of ranks) {
      const own = ofRank(window, rank);
      if (!own) continue;
      const compact = view.rank === "all";
      const height = compact ? COMPACT : LANE;
      timeline.lanes.forEach((name, lane) => {
        const spans = own.spans.filter((s) => s.lane === lane);
        rows.push({ panel, window, rank, lane, name, spans, bounds: own.bounds, compact, y, height });
        y += height + (compact ? 1 : 3);
      });
      y += compact ? 5 : 0;
    }
    y += 6;
  }
  return { rows, height: y + FOOT };
}

function runOf(from, to) {
  return to - from === 1 ? `${from}` : `${from}–${to - 1}`;
}

function spanName(span) {
  const kind = span.kind.replace("_", "-");
  return span.from < 0 ? kind : `${kind} ${runOf(span.from, span.to)}`;
}

function gradientsOf([first, stop]) {
  return `gradients of iteration${stop - first > 1 ? "s" : ""} ${runOf(first, stop)}`;
}

function rankName(row) {
  return row.window.alike && view.rank === "all" ? "every rank" : `rank ${row.rank}`;
}

// Messages that nobody recorded, as in torch's DDP, are not the same as none.
function unrecorded(row) {
  return row.lane > 0 && row.panel === "measured" && !row.window.messages;
}

function describe(row, span) {
  const lines = [`${spanName(span)} · ${row.panel}`, `${rankName(row)}, ${row.name}, iteration ${span.iteration}`];
  if (span.generation) lines.push(`${span.lane ? "holds" : "applies"} the ${gradientsOf(span.generation)}`);
  lines.push(`starts at ${seconds(span.start)}, takes ${seconds(span.end - span.start)}`);
  if (span.size) lines.push(`${bytes(span.size)}, ${bytes(span.size / (span.end - span.start))}/s`);
  if (span.from >= 0) {
    const names = data.buckets.slice(span.from, span.to);
    const some = names.length > 4 ? [...names.slice(0, 2), "…", names[names.length - 1]] : names;
    lines.push(`bucket${span.to - span.from > 1 ? "s" : ""} ${some.join(", ") || spanName(span)}`);
  }
  return lines.join("\n");
}

// Rectangles of a lane: neighbours thinner than a pixel share one, in the look that fills most of
// it; a lone one is widened into the free space after it.
function shapes(row, x, width) {
  const found = [];
  let group = null;
  for (const span of row.spans) {
    const left = Math.max(0, x(span.start)), right = Math.min(width, x(span.end));
    if (right < 0 || left > width) continue;
    if (group && left - group.right < 0.4 && group.right - group.left < 1.2) {
      group.right = Math.max(group.right, right);
    } else {
      group = { left, right, shares: new Map() };
      found.push(group);
    }
    const look = span.fill === span.known ? span.known : `${span.known} ${span.fill}`;
    group.shares.set(look, (group.shares.get(look) || 0) + right - left);
  }
  found.forEach((g, i) => {
    const free = i + 1 < found.length ? found[i + 1].left : width;
    g.right = Math.max(g.right, Math.min(free, g.left + 1));
    g.look = [...g.shares].reduce((a, b) => (b[1] > a[1] ? b : a))[0];
  });
  return found;
}

// Where in its lane a kind is drawn: the halves of an all-reduce take the lower and the upper part.
function part(kind, { y, height }) {
  const half = Math.round(0.62 * height);
  if (kind === "reduce_scatter") return { y: y + height - half, height: half };
  return { y, height: kind === "all_gather" ? half : height };
}

function drawSpans(svg, row, x, width) {
  const paths = new Map();
  for (const { left, right, look } of shapes(row, x, width)) {
    const gap = !row.compact && right - left > 4 ? 0.7 : 0;
    const { y, height } = part(look.split(" ")[0], row);
    const shape = `M${left.toFixed(2)} ${y}h${(right - left - gap).toFixed(2)}v${height}H${left.toFixed(2)}z`;
    paths.set(look, (paths.get(look) || "") + shape);
  }
  for (const [look, d] of paths) draw("path", { class: look, d }, svg);
  if (row.lane === 0) for (const span of row.spans) markApplied(svg, row, span, x, width);
  if (!row.compact) for (const span of row.spans) labelSpan(svg, row, span, x, width);
}

// The foot of an update has the colour of the gradients that it applies.
function markApplied(svg, row, span, x, width) {
  const left = Math.max(0, x(span.start)), right = Math.min(width, x(span.end));
  if (!span.generation || right < 0 || left > width) return;
  const height = row.compact ? 3 : 8;
  const box = { x: left, y: row.y + row.height - height, width: Math.max(2, right - left), height };
  draw("rect", { class: `g${span.generation[2]}`, ...box }, svg);
}

function labelSpan(svg, row, span, x, width) {
  const left = Math.max(0, x(span.start)), room = Math.min(width, x(span.end)) - left;
  const short = span.from < 0 ? "" : runOf(span.from, span.to);
  const of = span.lane && span.generation ? ` of it. ${runOf(...span.generation)}` : "";
  const names = of ? [spanName(span) + of, short + of, short] : [spanName(span), short];
  const text = names.find((t) => t && t.length * 6.2 + (t === short ? 4 : 8) < room);
  if (!text) return;
  const { y, height } = part(span.kind, row);
  const at = { x: left + room / 2, y: y + height / 2 + 4, "text-anchor": "middle" };
  const halo = span.kind === "wait" ? " halo" : "";
  draw("text", { ...at, class: `in in-${span.fill}${halo}` }, svg, text);
}

function drawBounds(svg, row, x) {
  row.bounds.forEach((bound, i) => {
    const last = i === 0 || i === row.bounds.length - 1;
    const at = x(bound).toFixed(2);
    const line = { class: last ? "period" : "iteration", x1: at, x2: at };
    draw("line", { ...line, y1: row.y - (row.compact ? 0 : 3), y2: row.y + row.height }, svg);
  });
}

function drawHead(svg, row, x) {
  const baseline = row.y + HEAD - 9;
  if (!row.window) {
    const missing = row.head === "predicted" ? "no prediction" : "nothing recorded";
    draw("text", { x: 8, y: baseline }, svg, missing);
    return;
  }
  const rank = view.rank === "all" ? [...row.window.ranks.keys()][0] : Number(view.rank);
  const own = ofRank(row.window, rank);
  if (!own) {
    draw("text", { x: 8, y: baseline }, svg, `nothing recorded for rank ${rank}`);
    return;
  }
  own.bounds.slice(1).forEach((end, i) => {
    const left = x(own.bounds[i]), room = x(end) - left;
    const label = [`iteration ${row.window.first + i}`, `${row.window.first + i}`].find((t) => t.length * 6 + 8 < room);
    if (label) draw("text", { x: left + room / 2, y: baseline, "text-anchor": "middle" }, svg, label);
  });
  drawGenerations(svg, row, own.bounds, x);
}

// Above its iterations, a bar in the colour of every generation.
function drawGenerations(svg, row, bounds, x) {
  for (const [first, stop, colour] of row.window.generations) {
    const [from, to] = [first, stop].map((t) => Math.min(bounds.length - 1, Math.max(0, t - row.window.first)));
    const left = x(bounds[from]) + 2, width = x(bounds[to]) - 2 - left;
    if (width > 0) draw("rect", { class: `g${colour}`, x: left, y: row.y + HEAD - 6, width, height: 3 }, svg);
  }
}

function drawAxis(svg, domain, x, width, height) {
  const scale = domain >= 10 ? ["s", 1] : domain >= 0.01 ? ["ms", 1e3] : ["µs", 1e6];
  const { values, decimals } = ticks(0, domain * scale[1], width / 90);
  for (const value of values) {
    const at = x(value / scale[1]);
    draw("line", { class: "gridline", x1: at, x2: at, y1: 0, y2: height - FOOT }, svg);
    if (width - at < 16 && at > 0) continue;
    const label = fixed(value, decimals) + (value === 0 ? ` ${scale[0]}` : "");
    draw("text", { x: at + (value ? 0 : 4), y: height - 10, "text-anchor": value ? "middle" : "start" }, svg, label);
  }
}

function drawNames(names, rows, timeline) {
  names.replaceChildren();
  const place = (y, height, className) => {
    const line = element("div", className, names);
    line.style.top = `${y}px`;
    line.style.height = `${height}px`;
    return line;
  };
  for (const row of rows) {
    if (row.head) {
      element("span", "", place(row.y, HEAD, "panel"), row.head);
    } else if (!row.compact) {
      const line = place(row.y, row.height, "");
      element("span", "lane-name", line, row.name).title = row.name;
      const known = row.panel === "predicted" || row.window.messages;
      const busy = known ? `${Math.round(100 * busyShare(row.spans, row.window.length))} %` : "–";
      const share = element("span", "busy", line, busy);
      share.title = "busy share of the period, waiting not counted";
    } else if (row.lane === 0) {
      element("span", "", place(row.y, timeline.lanes.length * (COMPACT + 1), ""), rankName(row));
    }
  }
}

function spanAt(rows, x, px, py, width) {
  const row = rows.find((r) => !r.head && py >= r.y - 1 && py <= r.y + r.height + 1);
  if (!row) return null;
  let best = null, nearest = 4;
  for (const span of row.spans) {
    const left = Math.max(0, x(span.start)), right = Math.min(width, x(span.end));
    const distance = px < left ? left - px : px > right ? px - right : 0;
    if (distance < nearest || (distance === 0 && nearest === 0 && span.start > best.start)) {
      best = span;
      nearest = distance;
    }
  }
  return best && { row, span: best };
}

function render(figure, timeline) {
  const names = figure.querySelector(".names"), scroll = figure.querySelector(".scroll");
  const width = Math.max(LEAST_WIDTH, scroll.clientWidth) * view.zoom;
  const domain = view.scale === "same" ? longest : lengthOf(timeline);
  const { rows, height } = layout(timeline);
  const x = (time) => (time / domain) * (width - 2) + 1;
  const svg = draw("svg", { width, height, tabindex: 0, role: "img", "aria-label": `${figure.getAttribute("aria-label")}. Arrow keys move from span to span.` });
  drawAxis(svg, domain, x, width, height);
  for (const row of rows.filter((r) => !r.head)) {
    const end = Math.min(width, x(row.window.length));
    draw("rect", { class: "lane", x: 1, y: row.y, width: Math.max(0, end - 1), height: row.height }, svg);
    drawSpans(svg, row, x, width);
    if (unrecorded(row) && !row.compact) draw("text", { x: 10, y: row.y + LANE / 2 + 4 }, svg, "messages not recorded: waiting for them is part of backward");
    drawBounds(svg, row, x);
  }
  for (const row of rows.filter((r) => r.head)) drawHead(svg, row, x);
  drawNames(names, rows, timeline);
  names.style.height = `${height}px`;
  scroll.replaceChildren(svg);
  interact(svg, scroll, rows, x, width);
}

function interact(svg, scroll, rows, x, width) {
  const cursor = draw("rect", { class: "cursor", visibility: "hidden" }, svg);
  const lanes = rows.filter((r) => !r.head && r.spans.length);
  let current = null;
  const select = (hit) => {
    current = hit;
    cursor.setAttribute("visibility", hit ? "visible" : "hidden");
    if (!hit) return hideTip();
    const left = Math.max(0, x(hit.span.start)), right = Math.min(width, x(hit.span.end));
    const box = { x: left, y: hit.row.y, width: Math.max(1, right - left), height: hit.row.height };
    for (const [name, value] of Object.entries(box)) cursor.setAttribute(name, value);
  };
  const atCursor = () => {
    cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
    const box = cursor.getBoundingClientRect();
    showTip(describe(current.row, current.span), box.left, box.bottom);
  };
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    select(spanAt(rows, x, event.clientX - box.left, event.clientY - box.top, width));
    if (current) showTip(describe(current.row, current.span), event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", () => select(null));
  svg.addEventListener("blur", () => select(null));
  svg.addEventListener("keydown", (event) => {
    const next = step(lanes, current, event.key);
    if (next === undefined) return;
    event.preventDefault();
    select(next);
    if (next) atCursor();
  });
}

// The span that a key leads to; null hides the cursor, undefined leaves the key alone.
function step(lanes, current, key) {
  if (key === "Escape") return null;
  if (!lanes.length || !["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(key)) return undefined;
  if (!current) return { row: lanes[0], span: lanes[0].spans[0] };
  let { row, span } = current;
  const at = row.spans.indexOf(span), last = row.spans.length - 1;
  if (key === "Home" || key === "End") return { row, span: row.spans[key === "Home" ? 0 : last] };
  if (key === "ArrowLeft" || key === "ArrowRight")
    return { row, span: row.spans[Math.min(last, Math.max(0, at + (key === "ArrowRight" ? 1 : -1)))] };
  const lane = Math.min(lanes.length - 1, Math.max(0, lanes.indexOf(row) + (key === "ArrowDown" ? 1 : -1)));
  row = lanes[lane];
  const distance = (s) => Math.abs(s.start - span.start);
  return { row, span: row.spans.reduce((a, b) => (distance(b) < distance(a) ? b : a)) };
}

function startTimelines() {
  const figures = [...document.querySelectorAll("[data-timeline]")];
  if (!figures.length) return;
  const ranks = allRanks(), rank = document.getElementById("rank"), zoom = document.getElementById("zoom");
  for (const r of ranks) rank.append(new Option(String(r), String(r)));
  if (ranks.length > 1) rank.append(new Option("all", "all"));
  view.rank = rank.value;
  document.getElementById("controls").hidden = false;
  drawLegend();
  const redraws = figures.map((figure) => {
    element("div", "names", figure);
    const scroll = element("div", "scroll", figure);
    const redraw = () => render(figure, timelines[Number(figure.dataset.timeline)]);
    onWidth(scroll, redraw);
    return redraw;
  });
  const change = () => {
    view.rank = rank.value;
    view.zoom = Number(zoom.value);
    view.scale = document.querySelector("input[name=scale]:checked").value;
    hideTip();
    redraws.forEach((redraw) => redraw());
  };
  document.getElementById("controls").addEventListener("change", change);
}

startTimelines();
