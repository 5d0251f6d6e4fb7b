// The card of a remote reference: what is known of it, and buttons to ask for more.

import { beFound, button, connect, element } from "./buttons.js";

function render({ model, el }) {
  const body = element("div", "nbdist-known");
  const row = element("div", "nbdist-row");
  const peeked = element("div", "nbdist-peeked");
  const line = element("div", "nbdist-notice");
  line.setAttribute("role", "status");
  const wire = connect(model, line, "Use rref.peek() and rref.release() when the cell has ended.");
  const peek = button("Peek", "Ask the owner what the value looks like", () => wire.press({ press: "peek" }));
  const release = button("Release", "Let go of the value", () => wire.press({ press: "release" }));
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
