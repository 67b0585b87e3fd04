"use strict";
// Values of the charts under the pointer. All boxes and lines are drawn in Python.

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
}

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
