// The view of a backward pass: draws its snapshot, and sends what is pressed.

import { bytes, time } from "./amounts.js";
import { beFound, button, connect, element, shape } from "./buttons.js";
import { amountText, ink, lightness, quantity, ramp, scale } from "./colours.js";
import { count, details, label, stateOf, whole } from "./graph.js";
import { BOX, GAP, layout } from "./layout.js";
import { legend, outlined } from "./legend.js";
import { filler, linked } from "./links.js";
import { routes } from "./routes.js";
import { bars } from "./sparkline.js";
import { walk } from "./walk.js";
import { STEP, zoomed } from "./zoom.js";

const ENDLESS = "#8b1a1a"; // what is not finite stands on no scale
const COLOURS = { state: "state", time: "time", norm: "norm" };

function histogram({ low, high, counts }) {
  const made = element("div", "value nbdist-histogram");
  const svg = shape("svg", { height: 40, viewBox: "0 0 192 40", preserveAspectRatio: "none", role: "img" });
  shape("title", {}, svg).textContent = `${counts.reduce((one, other) => one + other, 0)} values, or a sample of that size`;
  for (const bar of bars(counts, 192, 40)) shape("rect", bar, svg);
  made.append(element("span", "", low.toPrecision(3)), svg, element("span", "", high.toPrecision(3)));
  return made;
}

/** Whether the page has a dark theme: whether its texts are light. */
function isDark(el) {
  const found = getComputedStyle(el).color.match(/\d+/g) ?? [0, 0, 0];
  return lightness(`#${found.slice(0, 3).map((part) => Number(part).toString(16).padStart(2, "0")).join("")}`) > 0.3;
}

function render({ model, el }) {
  beFound(model, el);
  el.classList.add("nbdist-view");
  const head = element("div", "nbdist-row");
  const tools = element("div", "nbdist-row");
  const status = element("span", "nbdist-status");
  const line = element("div", "nbdist-notice");
  line.setAttribute("role", "status");
  const frame = element("div", "nbdist-frame");
  const names = element("div", "nbdist-lanes");
  const stage = element("div", "nbdist-stage");
  const remarks = element("ul", "nbdist-remarks");
  const told = element("div", "nbdist-details");
  const table = element("table", "nbdist-shares");
  const wire = connect(model, el, line, "With %%watch -a the cell returns at once, and the buttons work; so does its handle: _.step(3), _.run().");
  const meanings = legend();
  const expanded = new Set();
  let opened = 0; // the last scrollTop that was set here: where it is another one, somebody has scrolled
  let grouped = null;
  let chosen = null;
  let drawn = "";
  let found = null; // the layout that is drawn
  let svg = null;
  let parts = [];
  let key = null; // of the chosen node: in another pass it may stand elsewhere
  let stop = null; // the id of the box that the Tab key stops at
  let now = whole(model.get("outline"), model.get("snapshot"));

  frame.append(stage);
  stage.append(names);
  const zoom = zoomed(
    frame,
    () => ({ width: found?.width ?? 1, room: frame.clientWidth - names.offsetWidth }),
    (size) => {
      if (!svg) return;
      const room = frame.clientWidth - names.offsetWidth;
      const width = Math.max(found.width, room / size); // the lanes go on to the frame's edge
      svg.setAttribute("width", width * size);
      svg.setAttribute("height", found.height * size);
      svg.setAttribute("viewBox", `0 0 ${width} ${found.height}`);
      found.lanes.forEach((lane, index) => {
        names.children[index].style.height = `${lane.height * size}px`;
      });
      frame.style.scrollPaddingLeft = `${names.offsetWidth + 4}px`;
      // Of a high picture the pass's beginning is shown first: the lanes above it may be empty there.
      if (frame.scrollTop !== opened || !found.boxes.length) return;
      frame.scrollTop = (found.places[walk(found, 0, "Home")].y - GAP.lane) * size;
      opened = frame.scrollTop; // which may be less
    },
  );

  const buttons = {
    pause: wire.acting("Pause", "Halt before the next node on every worker", { press: "pause" }),
    step: wire.acting("Step", "Let one node run", { press: "step" }),
    worker: wire.acting("Step worker", "Let one node of the chosen node's worker run", () => {
      const node = now.nodes?.[chosen];
      return { press: "step", worker: node ? now.workers[node.w] : null };
    }),
    message: wire.acting("To message", "Run until gradients go to another worker", { press: "until", until: "message" }),
    nan: wire.acting("To NaN", "Run until the first NaN or Inf comes up", { press: "until", until: "nan" }),
    here: wire.acting("To node", "Run until before the chosen node", () => {
      const node = now.nodes[chosen];
      return { press: "until", until: [now.workers[node.w], node.n] };
    }),
    run: wire.acting("Run", "Let it go on to its end", { press: "run" }),
    slow: wire.acting("Slow", "Let it go on by itself, a few nodes a second", { press: "slow" }),
    group: button("Modules", "Show nodes by module, or all of them", () => {
      grouped = !(grouped ?? layout(now).boxes.some((box) => box.group));
      expanded.clear();
      draw();
    }),
  };
  const colour = element("select", "nbdist-button");
  for (const [value, text] of Object.entries(COLOURS)) colour.append(new Option(text, value));
  colour.onchange = () => draw();
  const chooser = element("label", "nbdist-choice", "Colour by ");
  chooser.append(colour);
  const sizes = [
    button("−", "Smaller (in the picture: the key −, or the wheel with Ctrl)", () => zoom.by(1 / STEP)),
    button("+", "Larger (in the picture: the key +, or the wheel with Ctrl)", () => zoom.by(STEP)),
    button("Fit", "As large as there is room for (in the picture: the key 0)", () => zoom.fit()),
  ];
  sizes[0].setAttribute("aria-label", "Smaller");
  sizes[1].setAttribute("aria-label", "Larger");
  head.append(...Object.values(buttons));
  tools.append(...sizes, chooser, status);
  el.append(head, line, tools, frame, meanings.element, remarks, told, table);

  const keyOf = (node) => [now.workers[node.w], node.n];
  const boxOf = (node) => found.boxes.findIndex((box) => box.nodes.includes(node));

  function choose(box) {
    if (!now.nodes) return; // what is drawn is over
    if (box.group) {
      expanded.add(box.key);
      grouped ??= true;
      draw();
      focus(boxOf(box.nodes[0])); // what had the focus has been drawn anew
    } else {
      select(box.nodes[0]);
    }
  }

  /** Choose a node, and go there; groups that it is in are opened. */
  function select(node) {
    if (!now.nodes?.[node]) return;
    chosen = node;
    key = keyOf(now.nodes[node]);
    model.send({ press: "look", node: key }); // not a press: it may stay unheard
    draw();
    for (let box = found.boxes[boxOf(node)]; box.group; box = found.boxes[boxOf(node)]) {
      expanded.add(box.key);
      draw();
    }
    focus(boxOf(node));
  }

  /** Have the keyboard's focus at a box, where it can be seen. */
  function focus(index) {
    const part = parts.made[index];
    if (!part) return;
    stopAt(index);
    part.group.focus({ preventScroll: true });
    part.group.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** Have the Tab key stop at this box, and at no other. */
  function stopAt(index) {
    for (const { group } of parts.made) group.setAttribute("tabindex", -1);
    parts.made[index]?.group.setAttribute("tabindex", 0);
    stop = found.boxes[index]?.id ?? null;
  }

  const steps = { "+": () => zoom.by(STEP), "=": () => zoom.by(STEP), "-": () => zoom.by(1 / STEP), 0: () => zoom.fit() };

  function type(event) {
    if (!svg || event.ctrlKey || event.metaKey || event.altKey) return;
    const path = event.composedPath();
    const at = path.includes(svg) ? parts.made.findIndex(({ group }) => path.includes(group)) : -1;
    if (at < 0) return;
    if (event.key === "Enter" || event.key === " ") choose(found.boxes[at]);
    else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) {
      focus(walk(found, at, event.key));
    } else if (steps[event.key]) steps[event.key]();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  function build(snapshot) {
    found = layout(snapshot, expanded, grouped ?? undefined);
    const before = { width: frame.scrollWidth, height: frame.scrollHeight }; // until it is sized: else the frame scrolls to 0
    svg = shape("svg", { role: "application", class: "nbdist-picture", ...before });
    const many = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
    const keys = "Left and right arrows go along the gradients, up and down within a column, Enter chooses";
    svg.setAttribute("aria-label", `Backward pass, ${many(snapshot.nodes.length, "node")} on ${many(snapshot.workers.length, "worker")}. ${keys}.`);
    names.replaceChildren();
    found.lanes.forEach((lane, index) => {
      const place = { x: 0, y: lane.top, width: "100%", height: lane.height };
      shape("rect", { ...place, class: `lane lane${index % 2}` }, svg);
      names.append(element("div", `worker lane${index % 2}`));
      names.lastChild.append(element("span", "", lane.worker));
      names.lastChild.title = lane.worker;
    });
    const drawnAs = routes(found);
    const lines = found.links.map((link, index) => {
      const path = shape("path", { d: drawnAs[index], class: "link" }, svg);
      if (link.message) shape("title", {}, path);
      return { link, path };
    });
    const made = found.boxes.map((box, index) => {
      const { x, y, width } = found.places[index];
      const group = shape("g", { transform: `translate(${x} ${y})`, tabindex: -1, role: "button" }, svg);
      const kind = box.group ? "group" : snapshot.nodes[box.nodes[0]].kind;
      outlined(kind, width, BOX.height, group);
      shape("text", { x: width / 2, y: 13, class: "name" }, group).textContent = label(box, snapshot);
      const below = shape("text", { x: width / 2, y: 25, class: "count" }, group);
      const title = shape("title", {}, group);
      group.addEventListener("click", () => choose(box));
      return { box, group, below, kind, title };
    });
    parts = { made, lines };
    const again = found.boxes.findIndex((box) => box.id === stop);
    stopAt(again >= 0 ? again : Math.max(0, chosen === null ? 0 : boxOf(chosen)));
    svg.addEventListener("focusin", (event) => {
      const at = made.findIndex(({ group }) => group === event.target);
      if (at >= 0) stopAt(at);
    });
    stage.replaceChildren(names, svg);
    zoom.apply();
  }

  /** Colour the boxes by an amount, or not, and tell that in the legend; returns a class and a text for each. */
  function paint(snapshot) {
    const what = colour.value;
    const dark = isDark(el);
    const amounts = what === "state" ? [] : found.boxes.map((box) => quantity(box, snapshot, what));
    const range = scale(amounts.filter((amount) => amount !== null));
    meanings.tell(what, range && { low: range.low, high: range.high, powers: range.powers }, dark);
    return parts.made.map(({ group }, index) => {
      const amount = amounts[index] ?? null;
      if (amount === null) return { name: what === "state" ? "" : "plain" };
      const fill = amount === Infinity ? ENDLESS : ramp(range.at(amount), dark);
      group.style.setProperty("--nbdist-fill", fill);
      group.style.setProperty("--nbdist-ink", ink(fill));
      return { name: "scaled", text: amountText(amount, what) };
    });
  }

  function update(snapshot) {
    const painted = paint(snapshot);
    parts.made.forEach(({ box, group, below, kind, title }, index) => {
      const state = stateOf(box, snapshot);
      const own = box.nodes.map((index) => snapshot.nodes[index]);
      const marks = [own.some((one) => one.bad) && "bad", own.some((one) => one.path) && snapshot.over && "path", own.some((one) => one.notes.length) && "noted"];
      const isChosen = !box.group && box.nodes[0] === chosen;
      const name = ["node", kind, state, painted[index].name, ...marks, isChosen && "chosen"].filter(Boolean).join(" ");
      if (group.getAttribute("class") !== name) group.setAttribute("class", name);
      const text = painted[index].text ?? count(box, snapshot);
      const [node] = own;
      const waits = !box.group && node.for.length ? `, waits for ${node.for.join(", ")}` : "";
      const notes = box.group ? [] : node.notes.map(([, told]) => `, ${told}`);
      const said = `${box.group ?? node.name} on ${snapshot.workers[box.w]}, ${state}, ${text}${waits}${notes.join("")}`;
      if (group.getAttribute("aria-label") !== said) {
        below.textContent = text;
        title.textContent = said;
        group.setAttribute("aria-label", said);
      }
    });
    for (const { link, path } of parts.lines) {
      if (!link.message) continue;
      const message = snapshot.messages[link.message.index];
      const name = `link message ${message.state}`;
      if (path.getAttribute("class") !== name) path.setAttribute("class", name);
      const title = `${bytes(message.bytes)}, with a call of ${message.call}: ${message.state}`;
      if (path.firstChild.textContent !== title) path.firstChild.textContent = title;
    }
  }

  const tellDetails = filler(told, ({ rows, values }) => {
    const made = [];
    for (const [name, parts] of rows) {
      const value = element("div", "value");
      value.append(...linked(parts, select));
      made.push(element("div", "key", name), value);
    }
    if (values) made.push(element("div", "key", "values of these"), histogram(values));
    return made;
  });
  const tellRemarks = filler(remarks, (given) =>
    given.map((parts) => {
      const made = element("li");
      made.append(...linked(parts.map((part) => (typeof part === "string" ? part : { text: part[0], node: part[1] })), select));
      return made;
    }),
  );

  function tell(snapshot) {
    status.textContent = snapshot.told ?? "";
    // As long as the cell goes on: where no pass is under way, the next one is meant.
    const open = !snapshot.ended;
    const node = snapshot.nodes?.[chosen];
    buttons.pause.disabled = !open || snapshot.paused;
    for (const name of ["step", "message", "nan", "slow"]) buttons[name].disabled = !open;
    buttons.run.disabled = !open || !snapshot.paused;
    buttons.worker.disabled = !open || !node;
    buttons.here.disabled = !open || !node || node.state === "done" || node.state === "unused";
    buttons.group.disabled = !snapshot.nodes;
    const detail = model.get("detail");
    const isOf = node && detail.counts && String(detail.node) === String(keyOf(node));
    tellDetails({ rows: node ? details(snapshot, chosen) : [], values: isOf ? detail : null });
    tellRemarks(snapshot.nodes ? (snapshot.remarks ?? []) : []);
    table.replaceChildren();
    const onGpus = (snapshot.shares ?? []).some((share) => share.gpu !== undefined);
    const rows = [["worker", "nodes", "busy", "waited", ...(onGpus ? ["GPU"] : []), "waits for"]];
    for (const share of snapshot.shares ?? []) {
      const gpu = onGpus ? [share.gpu === undefined ? "" : time(share.gpu)] : [];
      const times = [time(share.busy), time(share.idle), ...gpu];
      rows.push([share.worker, `${share.done}/${share.nodes}`, ...times, share.for.join(", ")]);
    }
    rows.forEach((row, index) => {
      const made = element("tr");
      made.append(...row.map((text) => element(index ? "td" : "th", "", text)));
      table.append(made);
    });
  }

  function draw() {
    now = whole(model.get("outline"), model.get("snapshot"));
    if (now.nodes) {
      const shown = `${grouped} ${[...expanded].join()}`;
      if (shown !== drawn) {
        drawn = shown;
        const again = key ? now.nodes.findIndex((node) => String(keyOf(node)) === String(key)) : -1;
        chosen = again >= 0 ? again : null;
        build(now);
      }
      update(now);
    }
    tell(now);
  }

  // Before the document hears of it: there Notebook 7 has meanings of its own for some of these keys.
  window.addEventListener("keydown", type, { capture: true });

  const redraw = () => {
    drawn = null;
    draw();
  };
  const retell = () => tell(now);
  model.on("change:outline", redraw);
  model.on("change:snapshot", draw);
  model.on("change:detail", retell);
  draw();
  return () => {
    wire.close();
    zoom.close();
    window.removeEventListener("keydown", type, { capture: true });
    model.off("change:outline", redraw);
    model.off("change:snapshot", draw);
    model.off("change:detail", retell);
  };
}

export default { render };
