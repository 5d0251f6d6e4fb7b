// The map of a swarm: a row for each worker and a column for each block, brought up to date with each snapshot.

import { bytes } from "./amounts.js";
import { HEIGHT, blocksTold, box, cellOf, clock, fill, grid, headTold, missing, notesTold, parts, rowTold, ruler, sessionTold } from "./blocks.js";
import { button, connect, element, shape } from "./buttons.js";
import { follow } from "./looking.js";

const COLUMNS = ["worker", "", "state", "", "has", "cache", "sessions", "steps"];
const LEGEND = [
  ["route", "on the session's route"],
  ["held", "with a worker"],
  ["away", "with a worker that is not online"],
  ["missing", "with nobody"],
];

/** Text that is changed only where it is another: what somebody has selected stays so. */
function say(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/** The blocks of one row; drawn anew only when they are others. */
function strip() {
  const svg = shape("svg", { class: "nbdist-blocks", height: HEIGHT, role: "img" });
  let drawn = "";
  return {
    svg,
    draw(own, count, told) {
      const key = JSON.stringify([own, count, told]);
      if (key === drawn) return;
      drawn = key;
      const cell = cellOf(count);
      svg.setAttribute("width", count * cell);
      svg.setAttribute("aria-label", told);
      svg.replaceChildren();
      shape("rect", { class: "track", width: count * cell, height: HEIGHT }, svg);
      for (const part of own) {
        const made = shape("rect", { class: part.kind, ...box(part, cell) }, svg);
        shape("title", {}, made).textContent = told;
      }
      shape("path", { class: "grid", d: grid(count, cell) }, svg);
    },
  };
}

function render({ model, el }) {
  el.classList.add("nbdist-view", "nbdist-map");
  const head = element("div", "nbdist-told");
  const session = element("div", "nbdist-told");
  const line = element("div", "nbdist-notice");
  line.setAttribute("role", "status");
  const frame = element("div", "nbdist-rows");
  const table = element("table");
  const names = element("thead");
  const body = element("tbody");
  const legend = element("div", "nbdist-legend");
  const notes = element("div", "nbdist-told");
  const log = element("pre", "nbdist-log");
  log.tabIndex = 0; // so that it can be scrolled by keys, which are then not the front end's
  log.dataset.lmSuppressShortcuts = "true";
  log.setAttribute("role", "log");
  log.setAttribute("aria-label", "what has happened");
  const columns = element("tr");
  columns.append(...COLUMNS.map((text) => element("th", "", text)));
  const numbers = shape("svg", { class: "nbdist-blocks", height: 12, "aria-hidden": "true" }, columns.children[3]);
  names.append(columns);
  table.append(names, body);
  frame.append(table);
  for (const [kind, text] of LEGEND) {
    const mark = shape("svg", { class: "nbdist-blocks", width: 10, height: HEIGHT, "aria-hidden": "true" }, legend);
    shape("rect", { class: kind, ...box({ begin: 0, end: 1, kind }, 10) }, mark);
    legend.append(element("span", "", text));
  }
  el.append(head, session, line, frame, legend, notes, log);
  const wire = connect(model, el, line, "Use swarm.kill(worker) when the cell has ended.");

  const rows = new Map();
  const nobody = makeRow("nobody");
  nobody.row.className = "nobody";
  let shown = "";
  let ruled = null;

  function makeRow(name) {
    const row = element("tr");
    const cells = COLUMNS.map((title) => {
      const cell = element("td");
      cell.dataset.title = title;
      return cell;
    });
    const blocks = strip();
    const state = element("span", "nbdist-state");
    const bar = element("div", "nbdist-fill");
    const full = element("div");
    const amount = element("span");
    const kill = wire.acting("Kill", `Kill the process of ${name}, as an accident would`, { press: "kill", worker: name });
    kill.setAttribute("aria-label", `Kill ${name}`);
    bar.append(full);
    say(cells[0], name);
    cells[3].append(blocks.svg);
    row.append(...cells);
    if (name !== "nobody") {
      cells[1].append(kill);
      cells[2].append(state);
      cells[5].append(bar, amount);
    }
    return { row, cells, blocks, state, bar, full, amount, kill };
  }

  function update({ row, cells, blocks, state, bar, full, amount, kill }, server, snapshot) {
    row.className = server.state;
    kill.hidden = snapshot.over;
    kill.disabled = server.state === "gone" || server.state === "offline";
    say(state, snapshot.over && server.state !== "gone" ? "" : server.state);
    const own = parts(server, snapshot.route, snapshot.over);
    blocks.draw(own, snapshot.count, rowTold(server, own));
    const count = server.blocks.reduce((sum, [begin, end]) => sum + end - begin, 0);
    say(cells[4], count ? `${count}, ${bytes(server.nbytes)}` : "");
    const { share, told } = fill(server);
    bar.hidden = share === null;
    full.style.width = `${100 * (share ?? 0)}%`;
    say(amount, told);
    say(cells[6], server.state === "gone" ? "" : String(server.sessions));
    say(cells[7], String(server.steps));
  }

  function drawRuler(count) {
    if (count === ruled) return;
    ruled = count;
    const cell = cellOf(count);
    numbers.setAttribute("width", count * cell + 12);
    numbers.replaceChildren();
    for (const { number, x } of ruler(count, cell)) shape("text", { x, y: 10 }, numbers).textContent = number;
  }

  function draw() {
    const snapshot = model.get("snapshot");
    say(head, headTold(snapshot));
    say(session, [sessionTold(snapshot), ...(snapshot.over ? [] : snapshot.users)].filter(Boolean).join("\n"));
    drawRuler(snapshot.count);
    const order = snapshot.servers.map(({ name }) => name); // each worker has one row, which the kernel has put in order
    order.forEach((name, index) => {
      if (!rows.has(name)) rows.set(name, makeRow(name));
      update(rows.get(name), snapshot.servers[index], snapshot);
    });
    if (order.join() !== shown) {
      shown = order.join();
      body.replaceChildren(...order.map((name) => rows.get(name).row), nobody.row);
    }
    legend.hidden = snapshot.over;
    const lost = missing(snapshot);
    nobody.row.hidden = !lost.length;
    nobody.blocks.draw(lost, snapshot.count, `nobody has ${blocksTold(lost)}`);
    say(notes, notesTold(snapshot.servers));
    const end = log.scrollHeight - log.scrollTop - log.clientHeight < 4; // else somebody reads further up
    say(log, snapshot.log.map(([at, text]) => `${clock(at)}  ${text}`).join("\n"));
    if (end) log.scrollTop = log.scrollHeight;
    log.hidden = !snapshot.log.length;
  }

  return follow(model, el, wire, draw);
}

export default { render };
