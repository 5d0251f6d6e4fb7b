// The panel of a cluster: a row for each worker, drawn anew with each snapshot; and whether somebody looks.

import { bytes } from "./amounts.js";
import { button, connect, element, shape } from "./buttons.js";
import { follow } from "./looking.js";
import { points, talk } from "./sparkline.js";

const WIDE = 56;
const rate = (value) => `${bytes(value)}/s`;
// What is drawn as a line for each worker: the least at the top of it, and the last value in words.
const COURSES = [
  { name: "cpu", title: "CPU", most: 1, told: (value) => `${Math.round(value * 100)} %` },
  { name: "memory", title: "memory", told: bytes },
  { name: "gpu_busy", title: "GPU", most: 1, told: (value) => `${Math.round(value * 100)} %` },
  { name: "gpu", title: "GPU memory", told: bytes },
  { name: "in", title: "in", most: 100_000, told: rate },
  { name: "out", title: "out", most: 100_000, told: rate },
];
const TITLES = ["worker", "", "state", "runs", "at", "calls", ...COURSES.map((each) => each.title)];

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hourCycle: "h23" });

function spark(title) {
  const svg = shape("svg", { class: "spark", width: WIDE, height: 18 });
  shape("title", {}, svg).textContent = title;
  shape("polyline", {}, svg);
  return svg;
}

function render({ model, el }) {
  el.classList.add("nbdist-view", "nbdist-panel");
  const frame = element("div", "nbdist-rows");
  const table = element("table");
  frame.append(table);
  const head = element("tr");
  head.append(...TITLES.map((text) => element("th", "", text)));
  table.append(head);
  const between = element("div", "nbdist-talk");
  const logs = element("pre", "nbdist-log");
  const line = element("div", "nbdist-notice");
  line.setAttribute("role", "status");
  el.append(frame, between, line, logs);
  const wire = connect(model, el, line, "Use %dist_status, the stop button and %dist_restart when the cell has ended.");
  const rows = new Map();

  function rowOf(name) {
    if (!rows.has(name)) {
      const row = element("tr");
      const cells = TITLES.map((title) => {
        const cell = element("td");
        cell.dataset.title = title;
        return cell;
      });
      const lines = COURSES.map((course, index) => {
        const line = spark(`${course.title}, the last minute`);
        const amount = element("span");
        cells.at(index - COURSES.length).append(line, amount);
        return { line, amount };
      });
      const interrupt = wire.acting("Interrupt", `Interrupt what runs on ${name}`, { press: "interrupt", worker: name });
      const restart = wire.acting("Restart", `Start ${name} anew`, { press: "restart", worker: name });
      cells[1].append(interrupt, restart);
      const at = button("", `Show all threads of ${name}`, () => wire.press({ press: "stacks", worker: name }));
      row.append(...cells);
      table.append(row);
      rows.set(name, { row, cells, lines, interrupt, at });
    }
    return rows.get(name);
  }

  function draw() {
    const snapshot = model.get("snapshot");
    el.classList.toggle("without-gpu-busy", !snapshot.tells_busy);
    el.classList.toggle("without-gpu", !snapshot.rows.some((told) => told.gpu.some(Boolean)));
    for (const told of snapshot.rows) {
      const { row, cells, lines, interrupt, at } = rowOf(told.name);
      row.className = told.lost ? "lost" : "";
      cells[0].textContent = told.name;
      cells[0].title = `${told.device}, process ${told.pid ?? "gone"}`;
      cells[2].textContent = told.state;
      cells[3].textContent = told.runs;
      at.textContent = told.where;
      cells[4].replaceChildren(...(told.where ? [at] : []));
      cells[5].textContent = told.calls ?? "";
      COURSES.forEach((course, index) => {
        lines[index].line.lastChild.setAttribute("points", points(told[course.name], WIDE, 18, course.most));
        lines[index].amount.textContent = course.told(told[course.name].at(-1) ?? 0);
      });
      interrupt.disabled = told.lost || !snapshot.running;
    }
    between.textContent = [talk(snapshot.talk).join("   "), ...snapshot.blamed].filter(Boolean).join("\n");
    const written = snapshot.rows.flatMap((told) => told.log.map(([at, text]) => `${clock(at)} [${told.name}] ${text}`));
    logs.textContent = [...snapshot.stacks, ...written].join("\n");
    logs.hidden = !logs.textContent;
  }

  return follow(model, el, wire, draw);
}

export default { render };
