// The card of a remote reference: what is known of it, and buttons to ask for more.

import { beFound, connect, element } from "./buttons.js";

function render({ model, el }) {
  const body = element("div", "nbdist-known");
  const row = element("div", "nbdist-row");
  const peeked = element("div", "nbdist-peeked");
  const line = element("div", "nbdist-notice");
  line.setAttribute("role", "status");
  const wire = connect(model, el, line, "Use rref.peek() and rref.release() when the cell has ended.");
  const peek = wire.acting("Peek", "Ask the owner what the value looks like", { press: "peek" });
  const release = wire.acting("Release", "Let go of the value", { press: "release" });
  row.append(peek, release);
  beFound(model, el);
  el.classList.add("nbdist-card");
  el.append(body, row, peeked, line);
  const draw = () => {
    body.innerHTML = model.get("value");
    peeked.innerHTML = model.get("peeked");
    row.hidden = !model.get("live");
  };
  for (const name of ["value", "peeked", "live"]) model.on(`change:${name}`, draw);
  draw();
  return () => {
    wire.close();
    for (const name of ["value", "peeked", "live"]) model.off(`change:${name}`, draw);
  };
}

export default { render };
