// The panel of a cluster: a row for each worker, drawn anew with each snapshot; and whether somebody looks.

import { button, connect, element, leavePicture } from "./buttons.js";
import { megabytes, points, talk } from "./sparkline.js";

const AGAIN = 4000; // ms after which the page says once more that somebody looks
const SVG = "http://www.w3.org/2000/svg";

function spark(title) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("width", 80);
  svg.setAttribute("height", 18);
  svg.append(document.createElementNS(SVG, "title"), document.createElementNS(SVG, "polyline"));
  svg.firstChild.textContent = title;
  return svg;
}

function render({ model, el }) {
  el.classList.add("nbdist-view", "nbdist-panel");
  const table = element("table");
  const head = element("tr");
  head.append(...["worker", "state", "runs", "at", "calls", "CPU", "memory", "", ""].map((text) => element("th", "", text)));
  table.append(head);
  const between = element("div", "nbdist-talk");
  const logs = element("pre", "nbdist-log");
  const line = element("div", "nbdist-notice");
  line.setAttribute("role", "status");
  el.append(table, between, line, logs);
  const wire = connect(model, line, "Use %dist_status, the stop button and %dist_restart when the cell has ended.");
  const rows = new Map();

  function rowOf(name) {
    if (!rows.has(name)) {
      const row = element("tr");
      const cells = Array.from({ length: 9 }, () => element("td"));
      const cpu = spark("CPU, the last minute");
      const memory = spark("memory, the last minute");
      const amounts = [element("span"), element("span")];
      cells[5].append(cpu, amounts[0]);
      cells[6].append(memory, amounts[1]);
      const interrupt = button("Interrupt", `Interrupt what runs on ${name}`, () => wire.press({ press: "interrupt", worker: name }));
      const restart = button("Restart", `Start ${name} anew`, () => wire.press({ press: "restart", worker: name }));
      cells[7].append(interrupt, restart);
      row.append(...cells);
      table.append(row);
      rows.set(name, { row, cells, cpu, memory, amounts, interrupt });
    }
    return rows.get(name);
  }

  function draw() {
    const snapshot = model.get("snapshot");
    for (const told of snapshot.rows) {
      const { row, cells, cpu, memory, amounts, interrupt } = rowOf(told.name);
      row.className = told.lost ? "lost" : "";
      cells[0].textContent = told.name;
      cells[0].title = `${told.device}, process ${told.pid ?? "gone"}`;
      cells[1].textContent = told.state;
      cells[2].textContent = told.runs;
      cells[3].textContent = told.where;
      cells[4].textContent = told.calls ?? "";
      cpu.lastChild.setAttribute("points", points(told.cpu, 80, 18, 1));
      memory.lastChild.setAttribute("points", points(told.memory, 80, 18));
      amounts[0].textContent = `${Math.round((told.cpu.at(-1) ?? 0) * 100)} %`;
      amounts[1].textContent = megabytes(told.memory.at(-1) ?? 0);
      interrupt.disabled = told.lost || !snapshot.running;
    }
    between.textContent = talk(snapshot.rows).join("   ");
    const lines = snapshot.rows.flatMap((told) => told.log.map((text) => `[${told.name}] ${text}`));
    logs.textContent = lines.join("\n");
    logs.hidden = !lines.length;
  }

  // Nobody looks at what is scrolled away, or in a page that lies behind another.
  let visible = true;
  const watcher = new IntersectionObserver((entries) => {
    visible = entries.at(-1).isIntersecting;
    tell();
  });
  watcher.observe(el);
  const tell = () => {
    if (visible && !document.hidden) model.send({ press: "looking" });
  };
  const timer = setInterval(tell, AGAIN);
  model.on("change:snapshot", draw);
  draw();
  tell();
  return () => {
    clearInterval(timer);
    watcher.disconnect();
    wire.close();
    model.off("change:snapshot", draw);
    leavePicture(el);
  };
}

export default { render };
