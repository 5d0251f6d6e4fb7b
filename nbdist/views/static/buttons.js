// Buttons whose presses go to the kernel. Where those do not arrive, a line says so in the place of the buttons.

const PATIENCE = 1500; // ms

export const UNHEARD =
  "The kernel is busy, and this front end cannot reach it meanwhile (it has no subshells, or they are switched off).";

/**
 * Sends messages that the kernel confirms; `unheard(true)` is called when one is not received in time,
 * `unheard(false)` when one is. `press` sends what a button says. `ask` only asks whether messages arrive; it asks a
 * second time before it calls that unheard, because JupyterLab sends a view's first message past the subshell that it
 * is only making then.
 *
 * The kernel sends a confirmation to all pages of a view. So the numbers of messages begin at random, and `received`
 * ignores a number that this page is not waiting for.
 */
export function presser(send, unheard, patience = PATIENCE) {
  let number = Math.floor(Math.random() * 2 ** 48);
  const waiting = new Map();
  const post = (message, late) => {
    number += 1;
    waiting.set(number, setTimeout(late, patience));
    send({ ...message, number });
  };
  return {
    press: (message) => post(message, () => unheard(true)),
    ask: () => post({}, () => post({}, () => unheard(true))),
    received(known) {
      if (!waiting.has(known)) return;
      clearTimeout(waiting.get(known));
      waiting.delete(known);
      unheard(false);
    },
    close() {
      for (const timer of waiting.values()) clearTimeout(timer);
      waiting.clear();
    },
  };
}

/**
 * The presser of a view: its messages, and the line in which it says what is wrong, with what to do `instead`.
 *
 * It asks at once whether the kernel hears the page: a cell may be running, and not all front ends reach the kernel
 * then. While it does not, the view `el` shows the line, and none of the buttons that `acting` has made.
 */
export function connect(model, el, line, instead) {
  let lost = false;
  const show = () => {
    const notice = model.get("notice");
    line.textContent = lost ? `${UNHEARD} ${instead}` : notice;
    line.hidden = !line.textContent;
    el.classList.toggle("nbdist-unheard", lost);
  };
  const made = presser(
    (message) => model.send(message),
    (is) => {
      lost = is;
      show();
    },
  );
  const listen = (message) => {
    if (message && "received" in message) made.received(message.received);
  };
  model.on("msg:custom", listen);
  model.on("change:notice", show);
  show();
  made.ask();
  return {
    press: made.press,
    /** A button that the kernel acts on; `message` is what it sends, or a function that returns it. */
    acting(label, title, message) {
      const pressed = () => made.press(typeof message === "function" ? message() : message);
      const one = button(label, title, pressed);
      one.classList.add("nbdist-acts");
      return one;
    },
    close() {
      made.close();
      model.off("msg:custom", listen);
      model.off("change:notice", show);
    },
  };
}

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** One of a drawing. */
export function shape(tag, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (parent) parent.appendChild(made);
  return made;
}

export function button(label, title, press) {
  const made = element("button", "nbdist-button", label);
  made.type = "button";
  made.title = title;
  made.onclick = press;
  return made;
}

/** Lets the page find a view: while its element is there, the picture of it that was saved is hidden. */
export function beFound(model, el) {
  el.classList.add(model.get("mark"));
}
