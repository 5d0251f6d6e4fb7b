// Whether somebody looks at a view, told to the kernel again and again: what nobody looks at need not be up to date.

import { beFound } from "./buttons.js";

const AGAIN = 4000; // ms after which the page says once more that somebody looks

/** Begins to tell; returns what ends that. What is scrolled away, or in a page behind another, nobody looks at. */
function tellLooking(model, el) {
  let visible = true;
  const tell = () => {
    if (visible && !document.hidden) model.send({ press: "looking" });
  };
  const watcher = new IntersectionObserver((entries) => {
    visible = entries.at(-1).isIntersecting;
    tell();
  });
  watcher.observe(el);
  const timer = setInterval(tell, AGAIN);
  tell();
  return () => {
    clearInterval(timer);
    watcher.disconnect();
  };
}

/** Draws a view now and with each snapshot, as long as there is a page; returns what ends that. */
export function follow(model, el, wire, draw) {
  beFound(model, el);
  model.on("change:snapshot", draw);
  draw();
  const stop = tellLooking(model, el);
  return () => {
    stop();
    wire.close();
    model.off("change:snapshot", draw);
  };
}
