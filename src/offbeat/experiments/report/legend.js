// The legend of all timelines: a key for every kind of span that some timeline shows.

function legendItem(list, words, width) {
  const item = element("li", "", list);
  const key = draw("svg", { width, height: 12, "aria-hidden": "true" }, item);
  item.append(words);
  return key;
}

function drawLegend() {
  const list = document.getElementById("kinds");
  const windows = data.timelines.flatMap((t) => PANELS.map((panel) => t[panel])).filter((w) => w);
  const names = windows.flatMap((w) => w.names), used = new Set(names.map((name) => name[1]));
  if (!used.size) return;
  for (const kind of Object.keys(KINDS).filter((k) => used.has(k))) {
    const box = part(kind, { y: 0, height: 12 });
    draw("rect", { class: kind, width: 14, rx: 2, ...box }, legendItem(list, KINDS[kind], 14));
  }
  const bar = legendItem(list, "iteration boundary", 4);
  draw("line", { class: "period", x1: 2, x2: 2, y1: 0, y2: 12 }, bar);
  if (windows.some((w) => w.generations.length)) legendOfGenerations(list, names);
}

function legendOfGenerations(list, names) {
  const words = "gradients in the colour of the bar above the iterations that they are from";
  const key = legendItem(list, words, 65);
  for (const i of [0, 1, 2, 3]) draw("rect", { class: `g${i}`, x: 17 * i, width: 14, height: 12, rx: 2 }, key);
  if (!names.some(([lane, , , , , , merged]) => lane === 0 && merged)) return;
  const update = legendItem(list, "update that applies gradients of that colour", 14);
  draw("rect", { class: "update", width: 14, height: 12, rx: 2 }, update);
  draw("rect", { class: "g0", y: 8, width: 14, height: 4 }, update);
}
