// Run by tests/views/test_static.py, under node.

import assert from "node:assert/strict";
import test from "node:test";

import { presser } from "../../nbdist/views/static/buttons.js";
import { bytes, time } from "../../nbdist/views/static/amounts.js";
import { boxes, count, details, label, stateOf, whole } from "../../nbdist/views/static/graph.js";
import { amountText, ink, lightness, quantity, ramp, scale } from "../../nbdist/views/static/colours.js";
import { BOX, layout } from "../../nbdist/views/static/layout.js";

import { circles } from "../../nbdist/views/static/ranks.js";
import { routes } from "../../nbdist/views/static/routes.js";
import { walk } from "../../nbdist/views/static/walk.js";
import { fitting, LEAST } from "../../nbdist/views/static/zoom.js";
import { bars, points, talk } from "../../nbdist/views/static/sparkline.js";

function node(w, n, more = {}) {
  const known = { name: "Mul", kind: "operation", module: "", line: "", shape: "float32[2]", state: "waiting" };
  return { w, n, ...known, waits: 1, got: 0, for: [], ms: null, at: null, norm: null, path: false, bad: false, ...more };
}

function chain(count, workers, module = () => "") {
  const nodes = Array.from({ length: count }, (_, n) => node(n % workers, n, { module: module(n) }));
  const links = [];
  const messages = [];
  for (let n = 1; n < count; n += 1) {
    if (nodes[n].w === nodes[n - 1].w) links.push([n - 1, n]);
    else messages.push({ id: n, index: messages.length, from: n - 1, to: n, bytes: 8, call: "f", state: "expected" });
  }
  return { workers: Array.from({ length: workers }, (_, w) => `worker${w}`), nodes, links, messages };
}

test("gradients go to the right, each worker has its lane, and no box lies upon another", () => {
  const snapshot = chain(40, 4);
  const found = layout(snapshot);
  assert.equal(found.boxes.length, 40);
  for (const link of found.links) assert.ok(found.places[link.from].x < found.places[link.to].x);
  const seen = new Set();
  found.boxes.forEach((box, index) => {
    const { x, y } = found.places[index];
    const lane = found.lanes[box.w];
    assert.ok(y >= lane.top && y + 30 <= lane.top + lane.height);
    assert.ok(!seen.has(`${x} ${y}`));
    seen.add(`${x} ${y}`);
  });
});

test("a worker without nodes has a lane as well, and nothing at all is a picture too", () => {
  const found = layout({ workers: ["worker0", "worker1"], nodes: [node(0, 0)], links: [], messages: [] });
  assert.equal(found.lanes.length, 2);
  assert.ok(layout({ workers: [], nodes: [], links: [], messages: [] }).width > 0);
});

test("many nodes are shown by module, and a module that is asked for in full", () => {
  const snapshot = chain(400, 1, (n) => `Net.layer${Math.floor(n / 40)}`);
  const folded = layout(snapshot);
  assert.equal(folded.boxes.length, 10);
  assert.equal(folded.links.length, 9);
  const opened = layout(snapshot, new Set(["0 Net.layer3"]));
  assert.equal(opened.boxes.length, 9 + 40);
  assert.equal(label(folded.boxes[0], snapshot), "Net.layer0 (40)");
  assert.equal(layout(snapshot, new Set(), false).boxes.length, 400);
});

/** What a deep network leaves: layers in blocks in parts, each with a parameter, and a shortcut around each block. */
function network(parts, blocks, layers) {
  const snapshot = { workers: ["worker0"], nodes: [], links: [], messages: [] };
  const add = (module, kind) => snapshot.nodes.push(node(0, snapshot.nodes.length, { module, kind })) - 1;
  let last = add("Net", "operation");
  for (let part = 0; part < parts; part += 1) {
    for (let block = 0; block < blocks; block += 1) {
      const begin = last;
      for (let layer = 0; layer < layers; layer += 1) {
        const made = add(`Net.part${part}.${block}.${layer}`, "operation");
        snapshot.links.push([last, made], [made, add("", "leaf")]);
        last = made;
      }
      snapshot.links.push([begin, last]);
    }
  }
  return snapshot;
}

test("modules of modules are folded until there is room, with their parameters, and unfolded one after the other", () => {
  const snapshot = network(4, 10, 10);
  assert.equal(snapshot.nodes.length, 801);
  const folded = layout(snapshot);
  assert.equal(folded.boxes.length, 1 + 40);
  assert.equal(folded.boxes[1].group, "Net.part0.0");
  assert.equal(folded.boxes[1].nodes.length, 20);
  const expanded = new Set([folded.boxes[1].id]);
  const opened = layout(snapshot, expanded);
  assert.equal(opened.boxes.length, 1 + 39 + 10);
  const layer = opened.boxes.find((box) => box.group === "Net.part0.0.3");
  assert.equal(layer.nodes.length, 2);
  assert.equal(layout(snapshot, new Set([...expanded, layer.id])).boxes.length, 1 + 39 + 9 + 2);
});

test("a parameter that two modules use stands by itself", () => {
  const snapshot = network(1, 1, 2);
  snapshot.links.push([1, 4]); // the second layer's, used by the first as well
  const found = layout(snapshot, new Set(), true);
  assert.deepEqual(found.boxes.map((box) => box.nodes.length), [1, 2, 1, 1]);
});

test("a module that is left and entered again is cut there, and opened as one", () => {
  const snapshot = chain(9, 1, (n) => (n < 3 || n > 6 ? "A" : "B"));
  const found = layout(snapshot, new Set(), true);
  assert.deepEqual(found.boxes.map((box) => box.nodes), [[0, 1, 2], [7, 8], [3, 4, 5, 6]]);
  assert.deepEqual(found.column, [0, 2, 1]);
  assert.equal(new Set(found.boxes.map((box) => box.id)).size, 3);
  assert.equal(layout(snapshot, new Set([found.boxes[1].key]), true).boxes.length, 5 + 1);
  const mixed = layout(chain(9, 1, (n) => (n % 2 ? "A" : "B")), new Set(), true);
  assert.deepEqual(mixed.boxes.map((box) => box.group), new Array(9).fill(null));
});

test("an outline and how far it is are one", () => {
  const outline = {
    workers: ["worker0"],
    nodes: [{ w: 0, n: 4, name: "Mul" }, { w: 0, n: 7, name: "Exp" }],
    links: [[0, 1]],
    messages: [{ from: 0, to: 1, bytes: 8, call: "f" }],
  };
  const snapshot = {
    states: "dh",
    got: [1, 2],
    for: { 1: ["worker2"] },
    ms: [0.5, null],
    norms: [2, "nan"],
    path: [0],
    bad: 1,
    messages: [[77, "arrived"]],
    told: "told",
  };
  const found = whole(outline, snapshot);
  const timed = whole(outline, { ...snapshot, gpu: [3.1, null] });
  assert.deepEqual(timed.nodes.map((node) => node.gpu), [3.1, null]);
  const [first, second] = found.nodes;
  assert.deepEqual(first, { w: 0, n: 4, name: "Mul", state: "done", got: 1, for: [], ms: 0.5, norm: 2, path: true, bad: false });
  assert.deepEqual([second.state, second.for, second.bad, second.norm], ["halted", ["worker2"], true, "nan"]);
  assert.deepEqual(found.messages, [{ from: 0, to: 1, bytes: 8, call: "f", id: 77, index: 0, state: "arrived" }]);
  assert.equal(found.told, "told");
  assert.equal(whole({}, { told: "x" }).nodes, undefined);
  assert.equal(whole(outline, { ...snapshot, states: "d" }).nodes, undefined); // another pass's
});

test("the state of a group is that of its most urgent node", () => {
  const of = (...states) => {
    const nodes = states.map((state, n) => node(0, n, { state }));
    return stateOf({ nodes: nodes.map((_, n) => n) }, { nodes });
  };
  assert.equal(of("done", "halted", "waiting"), "halted");
  assert.equal(of("done", "running"), "running");
  assert.equal(of("done", "done"), "done");
  assert.equal(of("done", "unused"), "done");
  assert.equal(of("done", "waiting"), "partly");
  assert.equal(of("ready", "waiting"), "ready");
  assert.equal(of("unused"), "unused");
});

test("what stands below a node", () => {
  const tell = (more) => count({ nodes: [0] }, { nodes: [node(0, 0, more)] });
  assert.equal(tell({ waits: 2, got: 1, for: ["worker1"] }), "1/2 awaits worker1");
  assert.equal(tell({ waits: 3, got: 1, for: ["worker1", "worker2"] }), "1/3 awaits 2 workers");
  assert.equal(tell({ waits: 1, got: 0, for: ["trainer_of_embeddings"] }), "0/1 awaits trainer_…");
  assert.equal(tell({ state: "halted", got: 1 }), "1/1, halted");
  assert.equal(tell({ state: "done", ms: 1.25 }), "1.3 ms");
  assert.equal(tell({ state: "unused" }), "takes no part");
  assert.equal(tell({ waits: 0, state: "ready" }), "ready");
  const group = { group: "A", nodes: [0, 1] };
  assert.equal(count(group, { nodes: [node(0, 0, { state: "done" }), node(0, 1)] }), "1/2 done");
});

const told = (rows) => rows.map(([name, parts]) => `${name} ${parts.map((part) => part.text ?? part).join("")}`).join("\n");

test("details tell the time on a GPU beside that of the processor", () => {
  const tell = (more) => told(details({ workers: ["worker0"], nodes: [node(0, 7, { ms: 0.5, ...more })], messages: [] }, 0));
  assert.ok(tell({ gpu: 3.1 }).includes("time 500 µs, GPU 3.1 ms"));
  for (const more of [{ gpu: null }, {}]) assert.ok(!tell(more).includes("GPU"));
});

test("details name the module, the parameter, the line and for whom a node waits", () => {
  const one = node(1, 7, { module: "Net.fc", label: "Net.fc.weight", line: "In[3]:3: y = fc(x)", for: ["worker2"], norm: 2 });
  const text = told(details({ workers: ["worker0", "worker1"], nodes: [one], messages: [] }, 0));
  for (const part of ["worker1:7 Mul", "Net.fc", "parameter Net.fc.weight", "In[3]:3: y = fc(x)", "waiting for worker2", "2.0000"]) {
    assert.ok(text.includes(part), part);
  }
});

test("details say where a receive's gradient goes, and where a node's gradient comes from, by links", () => {
  const snapshot = relayed();
  const sender = snapshot.nodes.findIndex((one) => one.kind === "receive");
  const message = snapshot.messages.find(({ from }) => from === sender);
  const target = snapshot.nodes[message.to];
  const rows = details(snapshot, sender);
  const name = `node ${target.n} ${target.name} on ${snapshot.workers[target.w]}`;
  assert.ok(told(rows).includes(`its gradient goes to ${name}`), told(rows));
  assert.deepEqual(rows.flatMap(([, parts]) => parts).filter((part) => part.node !== undefined), [{ text: name, node: message.to }]);
  assert.ok(told(details(snapshot, message.to)).includes(`a gradient comes from node ${snapshot.nodes[sender].n} receive`));
  const step = { workers: ["a", "b"], nodes: [node(0, 0), node(1, 0)], messages: [{ id: 4, from: 0, to: 1, state: "unused" }] };
  assert.ok(told(details(step, 0)).includes("its result goes to node 0 Mul on b, which takes no part"));
});

/** A perceptron of three layers on a worker each, whose activations go by way of the notebook: 21 nodes. */
function relayed() {
  const snapshot = { workers: ["worker0", "worker1", "worker2", "notebook"], nodes: [], links: [], messages: [] };
  const add = (w, name, kind, from) => {
    const index = snapshot.nodes.push(node(w, snapshot.nodes.length, { name, kind })) - 1;
    if (from !== undefined) snapshot.links.push([from, index]);
    return index;
  };
  const send = (from, to) => {
    const index = snapshot.messages.length;
    snapshot.messages.push({ id: 100 + index, index, from, to, bytes: 8, call: "f", state: "expected" });
  };
  let last = add(3, "receive", "receive", add(3, "MseLoss", "operation"));
  for (const w of [2, 1, 0]) {
    const relu = add(w, "Relu", "operation");
    send(last, relu);
    const linear = add(w, "Addmm", "operation", relu);
    add(w, "Parameter", "leaf", linear);
    add(w, "Parameter", "leaf", add(w, "T", "operation", linear));
    if (!w) break;
    const sent = add(w, "receive", "receive", linear);
    last = add(3, "receive", "receive");
    send(sent, last);
  }
  return snapshot;
}

/** The points of a path, close to one another. */
function traced(path) {
  const points = [];
  let [x, y] = [0, 0];
  for (const [, command, numbers] of path.matchAll(/([MHVLC])([^MHVLC]*)/g)) {
    const given = numbers.trim().split(/\s+/).map(Number);
    const [x0, y0] = [x, y];
    const along = {
      M: () => given,
      L: (at) => [x0 + (given[0] - x0) * at, y0 + (given[1] - y0) * at],
      H: (at) => [x0 + (given[0] - x0) * at, y0],
      V: (at) => [x0, y0 + (given[0] - y0) * at],
      C: (at) => [0, 1].map((part) => {
        const [a, b, c, d] = [[x0, y0][part], given[part], given[2 + part], given[4 + part]];
        return a * (1 - at) ** 3 + 3 * b * at * (1 - at) ** 2 + 3 * c * at ** 2 * (1 - at) + d * at ** 3;
      }),
    }[command];
    for (let step = 0; step <= 100; step += 1) points.push(along(step / 100));
    [x, y] = points.at(-1);
  }
  return points;
}

function checkLines(found) {
  routes(found).forEach((path, index) => {
    const { from, to } = found.links[index];
    for (const [x, y] of traced(path)) {
      assert.ok(Number.isFinite(x) && x >= 0 && x <= found.width && y >= 0 && y <= found.height, path);
      found.places.forEach((place, box) => {
        const inside = x > place.x + 1 && x < place.x + place.width - 1 && y > place.y + 1 && y < place.y + BOX.height - 1;
        assert.ok(!inside || box === from || box === to, `${path} runs through box ${box}`);
      });
    }
  });
}

test("a pass of 21 nodes over four workers fits into a page of 1,050 pixels", () => {
  const snapshot = relayed();
  assert.equal(snapshot.nodes.length, 21);
  const found = layout(snapshot);
  assert.ok(found.width <= 980, `${found.width}`); // the names of the lanes stand beside it
  found.host.forEach((host, index) => {
    if (host < 0) return;
    assert.equal(found.column[host], found.column[index]);
    assert.ok(found.places[host].y < found.places[index].y);
  });
  assert.ok(found.host.filter((host) => host >= 0).length >= 9); // six parameters, three receives
  assert.equal(new Set(found.places.map(({ x, y }) => `${x} ${y}`)).size, 21);
  checkLines(found);
});

/** Blocks, each of some layers with a parameter each, and a sum around it that the block makes, or the module around. */
function residual(blocks, layers, inner) {
  const snapshot = { workers: ["worker0"], nodes: [], links: [], messages: [] };
  const add = (module, kind, ...from) => {
    const index = snapshot.nodes.push(node(0, snapshot.nodes.length, { module, kind })) - 1;
    for (const other of from) snapshot.links.push([other, index]);
    return index;
  };
  let last = add("Net.head", "operation");
  for (let block = blocks - 1; block >= 0; block -= 1) {
    const sum = add(inner ? `Net.blocks.${block}` : "Net", "operation", last);
    last = sum;
    for (let layer = layers - 1; layer >= 0; layer -= 1) {
      last = add(`Net.blocks.${block}.${layer}`, "operation", last);
      add("", "leaf", last);
    }
    const joined = add(inner ? `Net.blocks.${block}` : "Net", "operation", last, sum);
    last = joined;
  }
  return snapshot;
}

for (const inner of [true, false]) {
  test(`16 folded blocks, whose sums are ${inner ? "their own" : "made around them"}, stand from left to right`, () => {
    const snapshot = residual(16, 11, inner);
    assert.ok(snapshot.nodes.length >= 375);
    const found = layout(snapshot);
    const columns = Array.from({ length: 16 }, (_, block) =>
      found.boxes.flatMap((box, index) => (box.group === `Net.blocks.${block}` ? [found.column[index]] : [])),
    );
    assert.ok(columns.every((each) => each.length === 1), JSON.stringify(columns));
    for (let block = 1; block < 16; block += 1) assert.ok(columns[block][0] < columns[block - 1][0]);
    for (const { from, to } of found.links) assert.ok(found.column[from] < found.column[to]);
    assert.equal(circles(found.boxes.length, found.links).length, 0);
    checkLines(found);
    checkLines(layout(snapshot, new Set([found.boxes.find((box) => box.group === "Net.blocks.7").key])));
  });
}

test("no line runs through a box where a network is shown in full", () => {
  checkLines(layout(residual(6, 5, true), new Set(), false));
  const crossing = chain(60, 4);
  for (let n = 12; n < 60; n += 7) crossing.links.push([n - 8, n]); // on the same worker, past other boxes
  checkLines(layout(crossing));
});

test("circles of boxes are found", () => {
  const links = [[0, 1], [1, 2], [2, 0], [2, 3], [3, 4], [4, 3], [5, 0]].map(([from, to]) => ({ from, to }));
  assert.deepEqual(circles(6, links).map((each) => each.toSorted()), [[3, 4], [0, 1, 2]]);
  assert.deepEqual(circles(3, [{ from: 0, to: 1 }, { from: 0, to: 2 }, { from: 1, to: 2 }]), []);
});

test("arrow keys lead to every box: along the gradients, and up and down a column", () => {
  const found = layout(relayed());
  const first = walk(found, 5, "Home");
  assert.equal(found.boxes[first].nodes[0], 0); // MseLoss
  assert.equal(found.column[walk(found, first, "End")], Math.max(...found.column));
  const seen = new Set([first]);
  for (const at of seen) for (const key of ["ArrowRight", "ArrowDown", "ArrowUp"]) seen.add(walk(found, at, key));
  assert.equal(seen.size, found.boxes.length);
  const relu = found.boxes.findIndex((box) => box.id === "2:2");
  const linear = walk(found, relu, "ArrowRight");
  assert.equal(found.boxes[linear].id, "2:3");
  assert.equal(walk(found, linear, "ArrowLeft"), relu);
  assert.equal(found.host[walk(found, linear, "ArrowDown")], linear);
  assert.equal(walk(found, walk(found, linear, "ArrowDown"), "ArrowUp"), linear);
  assert.equal(walk(found, first, "ArrowLeft"), first);
});

test("a picture is fitted to its room, but never so small that its texts cannot be read", () => {
  assert.equal(fitting(1000, 2000), 1);
  assert.equal(fitting(1000, 900), 0.9);
  assert.equal(fitting(1000, 300), LEAST);
  assert.equal(fitting(1000, 0), 1);
});

test("on each colour of a scale the ink can be read, in light and dark themes", () => {
  for (const dark of [false, true]) {
    for (let value = 0; value <= 1; value += 0.01) {
      const fill = ramp(value, dark);
      const [low, high] = [lightness(fill), lightness(ink(fill))].sort((one, other) => one - other);
      assert.ok((high + 0.05) / (low + 0.05) >= 4.5, `${fill} ${ink(fill)}`);
    }
    assert.ok(lightness(ramp(0, dark)) > lightness(ramp(1, dark)) !== dark); // much stands out from the page
  }
});

test("scales: of amounts close to one another, far apart, and of none", () => {
  const near = scale([1, 3, 5]);
  assert.deepEqual([near.low, near.high, near.powers, near.at(3)], [1, 5, false, 0.5]);
  const far = scale([0, 1, 10, 10000]);
  assert.deepEqual([far.low, far.high, far.powers], [0, 10000, true]);
  assert.ok(Math.abs(far.at(100) - 0.5) < 1e-9);
  assert.equal(far.at(0), 0);
  assert.equal(scale([2, 2]).at(2), 1);
  assert.equal(scale([0, 0]).at(0), 1);
  assert.equal(scale([]), null);
});

test("the amount of a box: the time of all its nodes, the largest norm, or none", () => {
  const snapshot = { nodes: [node(0, 0, { ms: 2, norm: 3 }), node(0, 1, { ms: 3, norm: "nan" }), node(0, 2), node(0, 3, { norm: 5 })] };
  assert.equal(quantity({ nodes: [0, 1, 2] }, snapshot, "time"), 5);
  assert.equal(quantity({ nodes: [0, 3] }, snapshot, "norm"), 5);
  assert.equal(quantity({ nodes: [0, 1] }, snapshot, "norm"), Infinity);
  assert.equal(quantity({ nodes: [2] }, snapshot, "norm"), null);
  assert.deepEqual([amountText(5, "time"), amountText(0.01234, "norm"), amountText(Infinity, "norm")], ["5.0 ms", "0.0123", "not finite"]);
});

test("a parameter is called by the end of its name, an operation by the beginning", () => {
  const of = (more) => label({ group: null, nodes: [0] }, { nodes: [node(0, 0, more)] });
  assert.equal(of({ kind: "leaf", name: "Parameter", label: "net.fc1.weight" }), "fc1.weight");
  assert.equal(of({ kind: "leaf", name: "Parameter", label: "net.projection.in_proj_weight" }), "…n_proj_weight");
  assert.equal(of({ kind: "leaf", name: "Parameter", label: "" }), "Parameter");
  assert.equal(of({ name: "MaxPool2DWithIndices" }), "MaxPool2DWithIn…");
});

test("times and sizes for people", () => {
  assert.deepEqual([0.0123, 2.34, 1234].map(time), ["12 µs", "2.3 ms", "1.23 s"]);
  assert.deepEqual([0, 999, 1500, 123456789].map(bytes), ["0 B", "999 B", "1.5 KB", "123 MB"]);
});

test("a press that is not heard in time is told, and one that is heard takes that back", async () => {
  const sent = [];
  const told = [];
  const wire = presser((message) => sent.push(message), (is) => told.push(is), 20);
  wire.press({ press: "step" });
  await new Promise((then) => setTimeout(then, 60));
  assert.deepEqual(told, [true]);
  wire.received(sent[0].number);
  wire.press({ press: "run" });
  wire.received(sent[1].number);
  await new Promise((then) => setTimeout(then, 60));
  assert.deepEqual(told, [true, false, false]);
  assert.deepEqual(sent.map((message) => message.press), ["step", "run"]);
});

test("whether the kernel hears the page is asked twice, without a press", async () => {
  const sent = [];
  const told = [];
  const wire = presser((message) => sent.push(message), (is) => told.push(is), 20);
  wire.ask();
  const { number } = sent[0];
  assert.deepEqual(sent, [{ number }]);
  await new Promise((then) => setTimeout(then, 80));
  assert.deepEqual(sent, [{ number }, { number: number + 1 }]);
  wire.received(number); // late: a cell was running
  assert.deepEqual(told, [true, false]);
  wire.received(number + 1);
  wire.ask();
  await new Promise((then) => setTimeout(then, 30));
  wire.received(number + 3); // the first was sent past the subshell, and waits
  await new Promise((then) => setTimeout(then, 60));
  assert.deepEqual(told, [true, false, false, false]);
});

test("what another page of the view hears is no confirmation for this one", async () => {
  const told = [[], []];
  const sent = [[], []];
  const wires = [0, 1].map((page) => presser((message) => sent[page].push(message), (is) => told[page].push(is), 20));
  for (const wire of wires) wire.press({ press: "step" });
  for (const wire of wires) wire.received(sent[0][0].number); // the kernel has heard the first page only
  await new Promise((then) => setTimeout(then, 60));
  assert.deepEqual(told, [[false], [true]]);
});

test("a line of the last values", () => {
  assert.equal(points([0, 1, 2], 80, 20), "0.0,20.0 40.0,10.0 80.0,0.0");
  assert.equal(points([0.5], 80, 20, 1), "0.0,10.0");
  assert.equal(points([], 80, 20), "");
  assert.equal(points([0, 0], 80, 20).includes("NaN"), false);
});

test("bars", () => {
  assert.deepEqual(bars([0, 1, 4], 30, 20), [
    { x: 0, y: 20, width: 9, height: 0 },
    { x: 10, y: 15, width: 9, height: 5 },
    { x: 20, y: 0, width: 9, height: 20 },
  ]);
  assert.equal(bars([1, 100000], 20, 10)[0].height, 1);
  assert.deepEqual(bars([], 20, 10), []);
});

test("who talks to whom", () => {
  const pairs = [
    { from: "worker0", to: "worker1", calls: 2, rate: 12_300_000 },
    { from: "w2", to: "a", calls: 1, rate: 0 },
    { from: "a", to: "w2", calls: 0, rate: 50_000 },
  ];
  assert.deepEqual(talk(pairs), ["worker0 → worker1: 2 calls, 12.3 MB/s", "w2 → a: 1 call", "a → w2: 50.0 KB/s"]);
});

test("a network of a thousand nodes, all of them", () => {
  const snapshot = network(4, 10, 13);
  const begun = performance.now();
  assert.equal(layout(snapshot, new Set(), false).boxes.length, 1041);
  console.log(`1,000 nodes of a network are laid out in ${Math.round(performance.now() - begun)} ms`);
});

test("a thousand nodes", () => {
  const snapshot = chain(1000, 4);
  for (let n = 10; n < 1000; n += 7) snapshot.links.push([n - 8, n]);
  const begun = performance.now();
  const found = layout(snapshot, new Set(), false);
  console.log(`1,000 nodes are laid out in ${(performance.now() - begun).toFixed(0)} ms`);
  assert.equal(found.boxes.length, 1000);
});
