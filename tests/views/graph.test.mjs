// Run by tests/views/test_static.py, under node.

import assert from "node:assert/strict";
import test from "node:test";

import { presser } from "../../nbdist/views/static/buttons.js";
import { bytes, time } from "../../nbdist/views/static/amounts.js";
import { boxes, count, details, label, layout, stateOf, whole } from "../../nbdist/views/static/graph.js";

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

test("a module that is left and entered again makes a circle, which is drawn all the same", () => {
  const snapshot = chain(9, 1, (n) => (n % 2 ? "A" : "B"));
  const found = layout(snapshot, new Set(), true);
  assert.equal(found.boxes.length, 2);
  assert.equal(found.places.length, 2);
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
  assert.equal(tell({ waits: 2, got: 1, for: ["worker1"] }), "1/2 waits for worker1");
  assert.equal(tell({ state: "done", ms: 1.25 }), "1.3 ms");
  assert.equal(tell({ state: "unused" }), "takes no part");
  assert.equal(tell({ waits: 0, state: "ready" }), "ready");
  const group = { group: "A", nodes: [0, 1] };
  assert.equal(count(group, { nodes: [node(0, 0, { state: "done" }), node(0, 1)] }), "1/2 done");
});

test("details name the module, the line and for whom a node waits", () => {
  const rows = details(node(1, 7, { module: "Net.fc", line: "cell:3: y = fc(x)", for: ["worker2"], norm: 2 }), "worker1");
  const told = rows.map((row) => row.join(" ")).join("\n");
  for (const part of ["worker1:7 Mul", "Net.fc", "cell:3: y = fc(x)", "waiting for worker2", "2.0000"]) {
    assert.ok(told.includes(part), part);
  }
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
