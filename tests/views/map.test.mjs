// Run by tests/views/test_static.py, under node.

import assert from "node:assert/strict";
import test from "node:test";

import {
  blocksTold,
  box,
  cellOf,
  clock,
  fill,
  grid,
  headTold,
  missing,
  notesTold,
  parts,
  ranges,
  rowTold,
  ruler,
  sessionTold,
} from "../../nbdist/views/static/blocks.js";

function server(name, blocks, more = {}) {
  return { name, state: "online", note: "", blocks, nbytes: 0, cache: 0, budget: null, sessions: 0, steps: 0, ...more };
}

function swarm(count, servers, more = {}) {
  return { count, bytes: 18e6 * count, servers, route: [], session: null, log: [], over: false, ...more };
}

const tuples = (found) => found.map(({ begin, end, kind }) => [begin, end, kind]);

test("a row is cut where it looks otherwise", () => {
  const route = [
    ["a", 0, 4],
    ["b", 4, 6],
    ["a", 6, 7],
  ];
  assert.deepEqual(tuples(parts(server("a", [[2, 8]]), route)), [
    [2, 4, "route"],
    [4, 6, "held"],
    [6, 7, "route"],
    [7, 8, "held"],
  ]);
  const joined = parts(server("a", [[0, 2], [2, 4], [6, 7]]), []);
  assert.deepEqual(tuples(joined), [
    [0, 4, "held"],
    [6, 7, "held"],
  ]);
  assert.deepEqual(tuples(parts(server("a", [[0, 4]], { state: "offline" }), route)), [[0, 4, "away"]]);
  assert.deepEqual(tuples(parts(server("a", [[0, 4]], { state: "draining" }), route)), [[0, 4, "route"]]);
  assert.deepEqual(parts(server("a", [[0, 4]], { state: "gone" }), route), []);
});

test("what nobody has", () => {
  const found = missing(swarm(4, [server("a", [[0, 2]], { state: "offline" }), server("b", [[1, 3]])]));
  assert.deepEqual(tuples(found), [
    [0, 1, "missing"],
    [3, 4, "missing"],
  ]);
  assert.deepEqual(missing(swarm(2, [server("a", [[0, 2]])])), []);
  assert.deepEqual(tuples(missing(swarm(2, []))), [[0, 2, "missing"]]);
});

test("blocks of any number have their place, and their numbers do not lie upon each other", () => {
  for (const count of [0, 1, 6, 30, 80, 300]) {
    const cell = cellOf(count);
    assert.ok(cell >= 4 && cell <= 30);
    if (count <= 100) assert.ok(cell * count <= 400);
    const numbers = ruler(count, cell);
    for (let index = 1; index < numbers.length; index += 1) assert.ok(numbers[index].x - numbers[index - 1].x >= 24);
    assert.ok(numbers.every(({ x }) => x < cell * count));
    assert.equal((grid(count, cell).match(/M/g) ?? []).length, Math.max(0, count - 1));
  }
  const whole = box({ begin: 2, end: 5, kind: "route" }, 10);
  const other = box({ begin: 2, end: 5, kind: "held" }, 10);
  assert.deepEqual([whole.x, whole.width], [20, 30]);
  assert.ok(other.height < whole.height && other.y > whole.y);
});

test("eighty blocks on sixteen workers", () => {
  const servers = Array.from({ length: 16 }, (_, n) => server(`worker${n}`, [[5 * n, 5 * n + 5]]));
  const route = servers.map(({ name }, n) => [name, 5 * n, 5 * n + 5]);
  const told = swarm(80, servers, { route });
  assert.deepEqual(missing(told), []);
  servers.forEach((each, n) => assert.deepEqual(tuples(parts(each, route)), [[5 * n, 5 * n + 5, "route"]]));
});

test("in words", () => {
  const one = server("a", [[0, 10], [20, 21]]);
  const route = [
    ["a", 0, 10],
    ["b", 10, 20],
    ["a", 20, 21],
  ];
  assert.equal(ranges(parts(one, [])), "0-9, 20");
  assert.equal(rowTold(one, parts(one, [])), "a: blocks 0-9, 20");
  assert.equal(rowTold(one, parts(one, route)), "a: blocks 0-9, 20; on the session's route 0-9, 20");
  assert.equal(rowTold(server("b", []), []), "b: no blocks");
  const gone = server("c", [], { state: "gone" });
  assert.equal(headTold(swarm(30, [one, one, gone])), "30 blocks, 540 MB; 3 workers: 2 online, 1 gone; nobody has blocks 10-19, 21-29");
  const none = swarm(1, [], { over: true });
  assert.equal(headTold(none), "this swarm is over; it had 1 block, 18.0 MB, and 0 workers");
  assert.equal(blocksTold([{ begin: 3, end: 4 }]), "block 3");
  assert.equal(notesTold([one, { ...gone, note: "killed" }, { ...one, name: "d", note: "d is silent" }]), "c: killed\nd is silent");
  assert.equal(sessionTold({ session: null, route: [] }), "");
  const session = { id: "4711.3", tokens: 57, rate: 23.44, state: "writing" };
  assert.equal(
    sessionTold({ session, route }),
    "session 4711.3: writing, 57 tokens, 23.4 tokens/s\nroute: a 0-9 → b 10-19 → a 20",
  );
  assert.equal(sessionTold({ session: { ...session, state: "idle" }, route: [] }), "session 4711.3: idle, 57 tokens");
  assert.equal(sessionTold({ session: { ...session, tokens: 1, rate: null }, route: [] }), "session 4711.3: writing, 1 token");
});

test("how full caches are", () => {
  assert.deepEqual(fill({ cache: 1_200_000, budget: null }), { share: null, told: "1.2 MB" });
  assert.deepEqual(fill({ cache: 25, budget: 50 }), { share: 0.5, told: "25 B of 50 B" });
  assert.equal(fill({ cache: 80, budget: 50 }).share, 1);
  assert.equal(fill({ cache: 0, budget: 0 }).share, 1);
  assert.deepEqual(fill({ state: "gone", cache: 0, budget: 50 }), { share: null, told: "" });
});

test("the time of day is that of the page", () => {
  assert.equal(clock(new Date(2025, 10, 22, 7, 4, 59).getTime() / 1000 + 0.12), "07:04:59");
});

test("of a swarm that is over, nobody misses blocks, and no session has a way", () => {
  const one = server("a", [[0, 2]]);
  const over = swarm(4, [one], { over: true, route: [["a", 0, 2]], session: { id: "1", tokens: 3, rate: 2, state: "writing" } });
  assert.deepEqual(tuples(missing(over)), []);
  assert.deepEqual(tuples(parts(one, over.route, true)), [[0, 2, "was"]]);
  assert.equal(sessionTold(over), "");
});
