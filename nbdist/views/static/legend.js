// What the shapes, lines and colours of the picture mean.

import { element, shape } from "./buttons.js";
import { amountText, ramp } from "./colours.js";

const SIZE = { width: 30, height: 16 };
const STATES_MEAN = {
  waiting: "waits",
  ready: "ready",
  running: "runs",
  halted: "halted",
  done: "done",
  partly: "partly done",
  unused: "takes no part",
};
const KINDS_MEAN = {
  operation: "operation",
  leaf: "parameter",
  receive: "receive, which sends its gradient on",
  group: "module, press to open",
};
const LINES_MEAN = {
  "link message expected": "message to come",
  "link message arrived": "message that came",
  "link message unused": "unused message",
};
const MARKS_MEAN = { path: "critical path", bad: "failed, or first NaN or Inf" };

/** The outline of a box of some kind, in a drawing. */
export function outlined(kind, width, height, parent) {
  if (kind === "group") shape("rect", { class: "back", x: 3, y: -3, width: width - 3, height, rx: 4 }, parent);
  if (kind === "receive") {
    const [point, middle] = [width - 7, height / 2];
    return shape("path", { class: "box", d: `M0 0 H${point} L${width} ${middle} L${point} ${height} H0 Z` }, parent);
  }
  return shape("rect", { class: "box", width, height, rx: kind === "leaf" ? height / 2 : 4 }, parent);
}

/** Returns a legend that can be folded away, and what has it tell the colours: of states, or on a scale of amounts. */
export function legend() {
  const made = element("details", "nbdist-meanings");
  made.open = true;
  made.append(element("summary", "", "Legend"));
  const colours = element("div", "nbdist-meaning");
  const shapes = element("div", "nbdist-meaning");
  made.append(colours, shapes);
  for (const [kind, text] of Object.entries(KINDS_MEAN)) shapes.append(item(text, (svg) => node(svg, "plain", kind)));
  for (const [name, text] of Object.entries(LINES_MEAN)) {
    shapes.append(item(text, (svg) => shape("path", { class: name, d: `M0 ${SIZE.height / 2} H${SIZE.width}` }, svg)));
  }
  for (const [name, text] of Object.entries(MARKS_MEAN)) shapes.append(item(text, (svg) => node(svg, name, "operation")));
  let shown = null;

  function tell(what, range, dark) {
    const text = JSON.stringify([what, range, dark]);
    if (text === shown) return;
    shown = text;
    colours.replaceChildren();
    if (what === "state") {
      for (const [state, meaning] of Object.entries(STATES_MEAN)) {
        colours.append(item(meaning, (svg) => node(svg, state, "operation")));
      }
      return;
    }
    if (range) colours.append(...bar(range, what, dark));
    colours.append(item(range ? "not measured" : nothing(what), (svg) => node(svg, "plain", "operation")));
  }

  return { element: made, tell };
}

function nothing(what) {
  return what === "time" ? "no node has run yet" : "no norm is known: norms are off, or no node has run yet";
}

function item(text, draw) {
  const made = element("span", "nbdist-meaning-item");
  const svg = shape("svg", { ...SIZE, viewBox: `-2 -4 ${SIZE.width + 6} ${SIZE.height + 6}`, "aria-hidden": "true" });
  svg.classList.add("nbdist-picture");
  draw(svg);
  made.append(svg, element("span", "", text));
  return made;
}

function node(svg, name, kind) {
  outlined(kind, SIZE.width, SIZE.height - 2, shape("g", { class: `sample ${name}` }, svg));
}

function bar(range, what, dark) {
  const made = element("span", "nbdist-scale");
  const stops = [0, 0.2, 0.4, 0.6, 0.8, 1].map((at) => ramp(at, dark));
  made.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  const name = what === "time" ? "time" : "norm of the gradients it got";
  const found = element("span", "nbdist-meaning-item");
  found.append(
    element("span", "", `${name}: ${amountText(range.low, what)}`),
    made,
    element("span", "", `${amountText(range.high, what)}${range.powers ? ", by powers of ten" : ""}`),
  );
  return [found];
}
