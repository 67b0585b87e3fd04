"use strict";
// Shows on which sides a box holds more than is seen: many systems hide scroll bars until they are used.

function showSides(box) {
  const hint = box.dataset.hint && element("p", "fine sideways", undefined, box.dataset.hint);
  if (hint) box.after(hint);
  const update = () => {
    const hidden = box.scrollWidth - box.clientWidth;
    box.classList.toggle("more-left", box.scrollLeft > 1);
    box.classList.toggle("more-right", box.scrollLeft < hidden - 1);
    if (hint) hint.hidden = hidden <= 1;
  };
  box.addEventListener("scroll", update, { passive: true });
  const watch = new ResizeObserver(update);
  const observe = () => [box, ...box.children].forEach((node) => watch.observe(node));
  new MutationObserver(() => { observe(); update(); }).observe(box, { childList: true });
  observe();
  update();
}

document.querySelectorAll(".box, .scroll").forEach(showSides);
