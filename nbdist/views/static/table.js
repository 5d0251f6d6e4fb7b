// The table of several references: what is known of them, brought up to date when news has come.

import { beFound, element } from "./buttons.js";

function render({ model, el }) {
  const body = element("div", "nbdist-known");
  beFound(model, el);
  el.classList.add("nbdist-card");
  el.append(body);
  const draw = () => {
    body.innerHTML = model.get("value");
  };
  model.on("change:value", draw);
  draw();
  return () => model.off("change:value", draw);
}

export default { render };
