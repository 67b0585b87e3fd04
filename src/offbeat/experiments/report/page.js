"use strict";
// Tooltips, keys and zoom of the page. All boxes and lines are drawn in Python.

const tip = document.getElementById("tip");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
  const top = y + 18 + box.height > innerHeight ? y - 12 - box.height : y + 18;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  tip.hidden = true;
  for (const node of document.querySelectorAll(".at, .same")) node.classList.remove("at", "same");
}

let boxesWithBuckets = [];

// Titles become tooltips; without scripts the browser shows them.
function prepareBoxes() {
  for (const node of document.querySelectorAll("main [title]")) {
    node.dataset.text = node.title;
    node.removeAttribute("title");
  }
  boxesWithBuckets = [...document.querySelectorAll("i[data-b]")].map((node) => {
    const [first, stop] = node.dataset.b.split("-").map(Number);
    return { node, first, stop };
  });
}

prepareBoxes();

// Marks a box and the boxes of the same buckets under every strategy.
function choose(node, x, y) {
  hideTip();
  if (!node) return;
  node.classList.add("at");
  const own = boxesWithBuckets.find((box) => box.node === node);
  for (const box of own ? boxesWithBuckets : [])
    if (box.first < own.stop && own.first < box.stop) box.node.classList.add("same");
  showTip(node.dataset.text, x, y);
}

document.addEventListener("pointermove", (event) => {
  if (!event.movementX && !event.movementY) return; // the page has moved, not the pointer
  const node = event.target.closest("[data-text]");
  if (node) choose(node, event.clientX, event.clientY);
  else if (!event.target.closest(".chart")) hideTip();
});
document.addEventListener("focusout", hideTip);

// --- keys ---------------------------------------------------------------------------------------

function visibleBoxes(lane) {
  return [...lane.querySelectorAll("i[data-text]")].filter((box) => {
    const inner = box.querySelector(":scope > i");
    return box.offsetParent && !(inner && inner.offsetParent);
  });
}

// The box that a key leads to; null to leave, undefined for other keys.
function nextBox(figure, current, key) {
  if (key === "Escape") return null;
  if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(key)) return undefined;
  const lanes = [...figure.querySelectorAll(".lane")].map(visibleBoxes).filter((boxes) => boxes.length);
  if (!lanes.length) return undefined;
  const row = lanes.findIndex((boxes) => boxes.includes(current));
  if (row < 0) return lanes[0][0];
  const boxes = lanes[row], at = boxes.indexOf(current);
  if (key === "Home") return boxes[0];
  if (key === "End") return boxes[boxes.length - 1];
  if (key === "ArrowLeft") return boxes[Math.max(0, at - 1)];
  if (key === "ArrowRight") return boxes[Math.min(boxes.length - 1, at + 1)];
  const other = lanes[Math.min(lanes.length - 1, Math.max(0, row + (key === "ArrowDown" ? 1 : -1)))];
  const left = current.getBoundingClientRect().left;
  const distance = (box) => Math.abs(box.getBoundingClientRect().left - left);
  return other.reduce((a, b) => (distance(b) < distance(a) ? b : a));
}

for (const figure of document.querySelectorAll(".lanes")) {
  let current = null;
  figure.addEventListener("keydown", (event) => {
    const next = nextBox(figure, current, event.key);
    if (next === undefined) return;
    event.preventDefault();
    current = next;
    if (next) next.scrollIntoView({ block: "nearest", inline: "nearest" });
    const box = next ? next.getBoundingClientRect() : { left: 0, bottom: 0 };
    choose(next, box.left, box.bottom);
  });
  figure.addEventListener("blur", () => { current = null; });
}

// --- zoom ---------------------------------------------------------------------------------------

const zoom = document.getElementById("zoom");
if (zoom) {
  zoom.closest("div").hidden = false;
  const figures = [...document.querySelectorAll(".lanes")];
  zoom.addEventListener("change", () => {
    for (const figure of figures) {
      if (zoom.value === "1") figure.removeAttribute("style");
      else figure.style.setProperty("--zoom", zoom.value);
    }
    const axis = document.querySelector(".axisrow");
    if (axis) axis.hidden = zoom.value !== "1";
  });
  // All figures show the same part of the window.
  for (const figure of figures)
    figure.addEventListener("scroll", () => {
      for (const other of figures) if (other.scrollLeft !== figure.scrollLeft) other.scrollLeft = figure.scrollLeft;
    }, { passive: true });
}

// --- other hosts --------------------------------------------------------------------------------

const host = document.getElementById("host");
if (host) {
  const figures = [...document.querySelectorAll(".lanes")];
  const shown = figures.map((figure) => figure.querySelector(".own")?.innerHTML);
  // The lanes of all hosts, one entry per figure: compressed HTML that Python drew.
  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  };
  const lanes = unpack(host.dataset.lanes);
  host.addEventListener("change", async () => {
    const all = await lanes;
    hideTip();
    figures.forEach((figure, n) => {
      const own = figure.querySelector(".own");
      if (own) own.innerHTML = all[n][host.value] ?? shown[n];
    });
    for (const strip of document.querySelectorAll(".hosts"))
      [...strip.children].forEach((bar, n) => bar.classList.toggle("chosen", host.options[n + 1].selected));
    prepareBoxes();
  });
}

// --- charts -------------------------------------------------------------------------------------

const SIZE = 10000;

// The points of a line in the units of the chart.
function pointsOf(path, right, [low, high]) {
  return [...path.getAttribute("d").matchAll(/(-?\d+) (-?\d+)/g)].map(([, x, y]) => ({
    x: (x / SIZE) * right, y: high - (y / SIZE) * (high - low),
  }));
}

function startChart(host) {
  const right = Number(host.dataset.x), range = host.dataset.y.split(" ").map(Number);
  const lines = [...host.querySelectorAll(".line")].reverse().map((path) => ({
    name: path.dataset.name, points: pointsOf(path, right, range),
  }));
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  cursor.hidden = true;
  host.append(cursor);
  let at = 0;
  const leave = () => {
    cursor.hidden = true;
    hideTip();
  };
  const put = (value, x, y) => {
    at = Math.min(right, Math.max(0, value));
    cursor.hidden = false;
    cursor.style.left = `${(100 * at) / right}%`;
    const texts = lines.map(({ name, points }) => {
      const near = points.reduce((a, b) => (Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a));
      const ended = at > points[points.length - 1].x * (1 + 1e-6);
      return `${name}: ${near.y.toPrecision(4)}${ended ? ", ended" : ""}`;
    });
    showTip([`at ${at.toPrecision(3)} ${host.dataset.unit}`, ...texts].join("\n"), x, y);
  };
  host.addEventListener("pointermove", (event) => {
    const box = host.getBoundingClientRect();
    put(((event.clientX - box.left) / box.width) * right, event.clientX, event.clientY);
  });
  host.addEventListener("pointerleave", leave);
  host.addEventListener("blur", leave);
  host.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    const target = { ArrowLeft: at - right / 50, ArrowRight: at + right / 50, Home: 0, End: right }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    const box = host.getBoundingClientRect();
    put(target, box.left + (Math.max(0, target) / right) * box.width, box.top + 20);
  });
}

document.querySelectorAll(".chart").forEach(startChart);
