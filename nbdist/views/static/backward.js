// The view of a backward pass: draws its snapshot, and sends what is pressed.

import { bytes, time } from "./amounts.js";
import { beFound, button, connect, element, shape } from "./buttons.js";
import { bars } from "./sparkline.js";
import { BOX, count, details, label, layout, stateOf, whole } from "./graph.js";


function histogram({ low, high, counts }) {
  const made = element("div", "value nbdist-histogram");
  const svg = shape("svg", { width: 192, height: 40, role: "img" });
  shape("title", {}, svg).textContent = `${counts.reduce((one, other) => one + other, 0)} values, or a sample of that size`;
  for (const bar of bars(counts, 192, 40)) shape("rect", bar, svg);
  made.append(element("span", "", low.toPrecision(3)), svg, element("span", "", high.toPrecision(3)));
  return made;
}

function curve(from, to) {
  const x1 = from.x + BOX.width;
  const y1 = from.y + BOX.height / 2;
  const y2 = to.y + BOX.height / 2;
  const middle = (x1 + to.x) / 2;
  return `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${to.x} ${y2}`;
}

function render({ model, el }) {
  beFound(model, el);
  el.classList.add("nbdist-view");
  const head = element("div", "nbdist-row");
  const status = element("span", "nbdist-status");
  const line = element("div", "nbdist-notice");
  line.setAttribute("role", "status");
  const frame = element("div", "nbdist-frame");
  const told = element("div", "nbdist-details");
  const table = element("table", "nbdist-shares");
  const wire = connect(model, line, "Use the handle instead: %%watch --paused -a, then _.step(3), _.run(), _.run(until=\"nan\").");
  const expanded = new Set();
  let grouped = null;
  let chosen = null;
  let drawn = "";
  let parts = [];
  let key = null; // of the chosen node: in another pass it may stand elsewhere
  let now = whole(model.get("outline"), model.get("snapshot"));

  const press = (message) => wire.press(message);
  const buttons = {
    pause: button("Pause", "Halt before the next node on every worker", () => press({ press: "pause" })),
    step: button("Step", "Let one node run", () => press({ press: "step" })),
    worker: button("Step worker", "Let one node of the chosen node's worker run", () => {
      const node = now.nodes?.[chosen];
      press({ press: "step", worker: node ? now.workers[node.w] : null });
    }),
    message: button("To message", "Run until gradients go to another worker", () => press({ press: "until", until: "message" })),
    nan: button("To NaN", "Run until the first NaN or Inf comes up", () => press({ press: "until", until: "nan" })),
    here: button("To node", "Run until before the chosen node", () => {
      const node = now.nodes[chosen];
      press({ press: "until", until: [now.workers[node.w], node.n] });
    }),
    run: button("Run", "Let it go on to its end", () => press({ press: "run" })),
    slow: button("Slow", "Let it go on by itself, a few nodes a second", () => press({ press: "slow" })),
    group: button("Modules", "Show nodes by module, or all of them", () => {
      grouped = !(grouped ?? layout(now).boxes.some((box) => box.group));
      expanded.clear();
      draw();
    }),
  };
  head.append(...Object.values(buttons), status);
  el.append(head, line, frame, told, table);

  const keyOf = (node) => [now.workers[node.w], node.n];

  function choose(box) {
    if (!now.nodes) return; // what is drawn is over
    if (box.group) {
      expanded.add(box.id);
      grouped ??= true;
    } else {
      [chosen] = box.nodes;
      key = keyOf(now.nodes[chosen]);
      model.send({ press: "look", node: key }); // not a press: it may stay unheard
    }
    draw();
    // What had the focus may have been drawn anew.
    parts.made.find((part) => part.box.nodes.includes(box.nodes[0]))?.group.focus();
  }

  function build(snapshot) {
    const found = layout(snapshot, expanded, grouped ?? undefined);
    const svg = shape("svg", {
      width: found.width,
      height: found.height,
      viewBox: `0 0 ${found.width} ${found.height}`,
      role: "group",
    });
    found.lanes.forEach((lane, index) => {
      shape("rect", { x: 0, y: lane.top, width: found.width, height: lane.height, class: `lane lane${index % 2}` }, svg);
      shape("text", { x: 6, y: lane.top + lane.height / 2 + 4, class: "worker" }, svg).textContent = lane.worker;
    });
    const lines = found.links.map((link) => {
      const path = shape("path", { d: curve(found.places[link.from], found.places[link.to]), class: "link" }, svg);
      if (link.message) shape("title", {}, path);
      return { link, path };
    });
    const made = found.boxes.map((box, index) => {
      const place = found.places[index];
      const group = shape("g", { transform: `translate(${place.x} ${place.y})`, tabindex: 0, role: "button" }, svg);
      const kind = box.group ? "group" : snapshot.nodes[box.nodes[0]].kind;
      shape("rect", { width: BOX.width, height: BOX.height, rx: kind === "leaf" ? 14 : 4 }, group);
      shape("text", { x: BOX.width / 2, y: 13, class: "name" }, group).textContent = label(box, snapshot);
      const below = shape("text", { x: BOX.width / 2, y: 25, class: "count" }, group);
      group.addEventListener("click", () => choose(box));
      group.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          choose(box);
        }
      });
      return { box, group, below, kind };
    });
    parts = { made, lines };
    frame.replaceChildren(svg);
  }

  function update(snapshot) {
    for (const { box, group, below, kind } of parts.made) {
      const state = stateOf(box, snapshot);
      const own = box.nodes.map((index) => snapshot.nodes[index]);
      const marks = [own.some((node) => node.bad) && "bad", own.some((node) => node.path) && snapshot.over && "path"];
      const name = ["node", kind, state, ...marks, !box.group && box.nodes[0] === chosen && "chosen"].filter(Boolean).join(" ");
      if (group.getAttribute("class") !== name) group.setAttribute("class", name);
      const text = count(box, snapshot);
      const whole = `${label(box, snapshot)}, ${state}, ${text}`;
      if (group.getAttribute("aria-label") !== whole) {
        below.textContent = text.length > 22 ? `${text.slice(0, 21)}…` : text;
        group.setAttribute("aria-label", whole);
      }
    }
    for (const { link, path } of parts.lines) {
      if (!link.message) continue;
      const message = snapshot.messages[link.message.index];
      const name = `link message ${message.state}`;
      if (path.getAttribute("class") !== name) path.setAttribute("class", name);
      const title = `message ${message.id}: ${bytes(message.bytes)}, made by the call of ${message.call}; ${message.state}`;
      if (path.firstChild.textContent !== title) path.firstChild.textContent = title;
    }
  }

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
    told.replaceChildren();
    if (node) {
      for (const [name, text] of details(node, snapshot.workers[node.w])) {
        told.append(element("div", "key", name), element("div", "value", text));
      }
      const detail = model.get("detail");
      if (detail.counts && detail.node[0] === snapshot.workers[node.w] && detail.node[1] === node.n) {
        told.append(element("div", "key", "values of these"), histogram(detail));
      }
    }
    table.replaceChildren();
    const rows = [["worker", "nodes", "busy", "waited", "waits for"]];
    for (const share of snapshot.shares ?? []) {
      rows.push([share.worker, `${share.done}/${share.nodes}`, time(share.busy), time(share.idle), share.for.join(", ")]);
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
        const found = key ? now.nodes.findIndex((node) => String(keyOf(node)) === String(key)) : -1;
        chosen = found >= 0 ? found : null;
        build(now);
      }
      update(now);
    }
    tell(now);
  }

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
    model.off("change:outline", redraw);
    model.off("change:snapshot", draw);
    model.off("change:detail", retell);
  };
}

export default { render };
