// Loss charts: one line per contestant, against seconds and against iterations.

const named = (list) => list.map((curve, i) => curve && { ...curve, index: i, label: data.labels[i] }).filter(Boolean);
const curves = named(data.curves);
const divergence = named(data.divergence || []);
const hidden = new Set();
const MARGIN = { left: 46, right: 14, top: 10, bottom: 34 };

// From the lowest to where the curves begin; a curve that diverges leaves the chart.
function lossRange(shown) {
  const finite = (values) => values.filter((v) => v !== null);
  const lows = [], tops = [];
  for (const curve of shown) {
    const raw = finite(curve.raw.mean);
    lows.push(...finite(curve.low || curve.mean), [...raw].sort((a, b) => a - b)[Math.floor(raw.length / 50)]);
    tops.push(finite(curve.high || curve.mean)[0], raw[0]);
  }
  if (data.target !== null) lows.push(data.target);
  const ends = [...finite(lows), ...finite(tops)].filter((v) => v !== undefined);
  if (!ends.length) return [0, 1];
  const low = Math.min(...ends), high = Math.max(low + 1e-9, ...tops.filter((v) => v !== undefined));
  const pad = 0.05 * (high - low);
  return [low - pad, high + pad];
}

// From 0 to the greatest.
function divergenceRange(shown) {
  return [0, 1.05 * Math.max(1e-9, ...shown.flatMap((curve) => curve.mean.filter((v) => v !== null)))];
}

function linePath(xs, ys, x, y) {
  let d = "", pen = "M";
  xs.forEach((value, i) => {
    if (ys[i] === null) {
      pen = "M";
    } else {
      d += `${pen}${x(value).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
      pen = "L";
    }
  });
  return d;
}

function bandPath(curve, key, x, y) {
  const ok = curve[key].map((_, i) => i).filter((i) => curve.low[i] !== null && curve.high[i] !== null);
  const up = ok.map((i) => `${x(curve[key][i]).toFixed(1)} ${y(curve.high[i]).toFixed(1)}`);
  const down = ok.reverse().map((i) => `${x(curve[key][i]).toFixed(1)} ${y(curve.low[i]).toFixed(1)}`);
  return up.length ? `M${[...up, ...down].join("L")}z` : "";
}

function seriesClass(curve) {
  return `s${curve.index % 8} d${Math.floor(curve.index / 8)}`;
}

function drawFrame(svg, box, key, xRange, yRange, x, y) {
  const across = ticks(...xRange, (box.right - box.left) / 80);
  const up = ticks(...yRange, 5);
  for (const value of up.values) {
    draw("line", { class: "gridline", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }, svg);
    draw("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, svg, fixed(value, up.decimals));
  }
  for (const value of across.values) {
    draw("line", { class: "axis", x1: x(value), x2: x(value), y1: box.bottom, y2: box.bottom + 4 }, svg);
    draw("text", { x: x(value), y: box.bottom + 17, "text-anchor": "middle" }, svg, fixed(value, across.decimals));
  }
  draw("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, svg);
  draw("text", { x: box.right, y: box.bottom + 31, "text-anchor": "end" }, svg, key === "seconds" ? "seconds" : "iteration");
}

function drawTarget(svg, box, y) {
  if (data.target === null) return;
  draw("line", { class: "target", x1: box.left, x2: box.right, y1: y(data.target), y2: y(data.target) }, svg);
  draw("text", { class: "on-ground", x: box.left + 6, y: y(data.target) - 5 }, svg, `target ${digits(data.target, 4)}`);
}

function rowHeight(curve) {
  return curve.votes.length > 16 ? 5 : 12;
}

function stripHeight(curve) {
  return 20 + rowHeight(curve) * curve.votes.length;
}

// Below the chart: a row per rank with a mark wherever it voted to synchronize.
function drawVotes(svg, box, top, voting, key, x) {
  for (const curve of voting) {
    const step = rowHeight(curve);
    draw("text", { x: box.left, y: top + 11 }, svg, `votes to synchronize, ${curve.label}`);
    curve.votes.forEach((marks, row) => {
      const y = top + 17 + row * step;
      draw("rect", { class: "lane", x: box.left, y, width: box.right - box.left, height: step - 2 }, svg);
      const d = marks[key].map((v) => `M${x(v).toFixed(1)} ${y}v${step - 2}`).join("");
      draw("path", { class: `vote s${curve.index % 8}`, d }, svg);
      if (step > 8) draw("text", { x: box.left - 8, y: y + 9, "text-anchor": "end" }, svg, `rank ${marks.rank}`);
    });
    top += stripHeight(curve);
  }
}

function chart(host) {
  const key = host.dataset.key, apart = host.dataset.what === "divergence";
  const shown = (apart ? divergence : curves).filter((c) => !hidden.has(c.index));
  host.replaceChildren();
  if (!shown.length) return;
  const width = Math.max(280, host.clientWidth), height = Math.round(Math.min(340, Math.max(230, width * 0.58)));
  const voting = shown.filter((curve) => curve.votes);
  const whole = height + voting.reduce((sum, curve) => sum + stripHeight(curve), 0);
  const box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const xRange = [0, Math.max(...shown.map((c) => c[key][c[key].length - 1]))], yRange = (apart ? divergenceRange : lossRange)(shown);
  const x = (v) => box.left + ((v - xRange[0]) / (xRange[1] - xRange[0] || 1)) * (box.right - box.left);
  const y = (v) => box.bottom - ((v - yRange[0]) / (yRange[1] - yRange[0])) * (box.bottom - box.top);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${whole}`, tabindex: 0, role: "img", "aria-label": `${apart ? "Divergence" : "Loss"} against ${key}. Arrow keys move the cursor.` }, host);
  drawFrame(svg, box, key, xRange, yRange, x, y);
  const clip = draw("clipPath", { id: `clip-${apart ? "apart-" : ""}${key}` }, svg);
  draw("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top }, clip);
  const lines = draw("g", { "clip-path": `url(#clip-${apart ? "apart-" : ""}${key})` }, svg);
  for (const curve of shown) {
    if (curve.low) draw("path", { class: `band ${seriesClass(curve)}`, d: bandPath(curve, key, x, y) }, lines);
    draw("path", { class: `series raw ${seriesClass(curve)}`, d: linePath(curve.raw[key], curve.raw.mean, x, y) }, lines);
  }
  if (!apart) drawTarget(svg, box, y);
  for (const curve of shown)
    draw("path", { class: `series line ${seriesClass(curve)}`, d: linePath(curve[key], curve.mean, x, y) }, lines);
  for (const curve of shown)
    if (curve.hit && data.target !== null) draw("circle", { class: `hit s${curve.index % 8}`, cx: x(curve.hit[key]), cy: y(data.target), r: 4 }, svg);
  drawVotes(svg, box, height, voting, key, x);
  pointAt(svg, box, key, shown, xRange, x, width);
}

function pointAt(svg, box, key, shown, xRange, x, width) {
  const line = draw("line", { class: "iteration", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
  let current = null;
  const put = (value, clientX, clientY) => {
    current = Math.min(xRange[1], Math.max(xRange[0], value));
    line.setAttribute("x1", x(current));
    line.setAttribute("x2", x(current));
    line.setAttribute("visibility", "visible");
    showTip(lossesAt(shown, key, current), clientX, clientY);
  };
  const leave = () => {
    current = null;
    line.setAttribute("visibility", "hidden");
    hideTip();
  };
  const point = (event) => {
    const outer = svg.getBoundingClientRect();
    const px = ((event.clientX - outer.left) / outer.width) * width;
    put(((px - box.left) / (box.right - box.left)) * (xRange[1] - xRange[0]) + xRange[0], event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction) return undefined;
    event.preventDefault();
    const outer = svg.getBoundingClientRect();
    const next = (current ?? xRange[0]) + (direction * (xRange[1] - xRange[0])) / 50;
    put(next, outer.left + (x(Math.max(0, next)) / width) * outer.width, outer.top + 20);
    return undefined;
  });
}

function lossesAt(shown, key, value) {
  const lines = [key === "seconds" ? `at ${seconds(value)}` : `iteration ${Math.round(value)}`];
  for (const curve of shown) {
    const xs = curve[key];
    const last = xs[xs.length - 1];
    if (value > last + 1e-9) {
      lines.push(`${curve.label}: ended, ${digits(curve.mean[xs.length - 1] ?? NaN, 4)}`);
      continue;
    }
    let i = xs.findIndex((v) => v >= value);
    if (i > 0 && value - xs[i - 1] < xs[i] - value) i -= 1;
    const loss = curve.mean[i];
    lines.push(`${curve.label}: ${loss === null ? "not finite" : digits(loss, 4)}`);
  }
  return lines.join("\n");
}

function startLosses() {
  const charts = [...document.querySelectorAll(".chart")], list = document.getElementById("series");
  for (const curve of list ? curves : []) {
    const button = element("button", "", element("li", "", list));
    const key = draw("svg", { width: 26, height: 10, "aria-hidden": "true" }, button);
    draw("line", { class: `series ${seriesClass(curve)}`, x1: 1, x2: 25, y1: 5, y2: 5 }, key);
    button.append(curve.label);
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      const off = hidden.has(curve.index) ? hidden.delete(curve.index) && false : Boolean(hidden.add(curve.index));
      button.setAttribute("aria-pressed", String(!off));
      charts.forEach(chart);
    });
  }
  charts.forEach((host) => onWidth(host, () => chart(host)));
}

startLosses();
