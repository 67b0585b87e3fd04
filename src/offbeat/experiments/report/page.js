"use strict";
// The page's data and what its charts share: elements, numbers, axes, the tooltip.

const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const SVG = document.getElementById("defs").namespaceURI;

function draw(tag, attributes, parent, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function element(tag, className, parent, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// As in the table: thousands with commas.
function fixed(value, decimals) {
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function digits(value, count = 3) {
  if (!value) return "0";
  const exponent = Number(value.toExponential(count - 1).split("e")[1]);
  const decimals = Math.max(0, count - 1 - exponent);
  return fixed(value, Math.min(decimals, 9));
}

function seconds(value) {
  const size = Math.abs(value);
  if (size >= 1) return `${digits(value)} s`;
  return size >= 1e-3 || size === 0 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
}

function bytes(value) {
  for (const [name, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (value >= scale) return `${digits(value / scale)} ${name}`;
  return `${value} B`;
}

// Round numbers from low to high, about `count` of them, and how many decimals they need.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((k) => k * power >= rough) * power;
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(i * step || 0);
  return { values, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

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

// Calls `redraw` now and whenever the width of `host` changes.
function onWidth(host, redraw) {
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(host.clientWidth - width) < 2) return;
    width = host.clientWidth;
    redraw();
  }).observe(host);
  width = host.clientWidth;
  redraw();
}
