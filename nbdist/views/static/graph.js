// Where the boxes of a backward pass stand: lanes by worker, gradients from left to right. Pure.

import { time } from "./amounts.js";
import * as dagre from "./dagre.js";

export const MOST = 300; // more nodes than this are shown by module at first,
const BOXES = 100; // in no more boxes than this, if modules of modules are enough for that
export const BOX = { width: 116, height: 30 };
const SWEEPS = 6;
const GAP = { rank: 26, row: 8, lane: 14 };
const NAME = 84; // the lanes' names stand before the boxes

const STATES = { u: "unused", w: "waiting", r: "ready", g: "running", h: "halted", d: "done" };

/** What the kernel tells in two parts as one: of what a pass consists, and how far that is. */
export function whole(outline, snapshot) {
  const fits = snapshot.states?.length === outline.nodes?.length && snapshot.messages?.length === outline.messages?.length;
  if (!outline.nodes || !fits) return { ...snapshot, nodes: undefined };
  const path = new Set(snapshot.path);
  const nodes = outline.nodes.map((node, index) => ({
    ...node,
    state: STATES[snapshot.states[index]],
    got: snapshot.got[index],
    for: snapshot.for[index] ?? [],
    ms: snapshot.ms[index],
    norm: snapshot.norms[index],
    path: path.has(index),
    bad: snapshot.bad === index,
  }));
  const messages = outline.messages.map((message, index) => {
    const [id, state] = snapshot.messages[index];
    return { ...message, id, index, state };
  });
  return { ...snapshot, ...outline, nodes, messages };
}

/** The module of each node, as parts of its path: who made it, and for what a module holds, who uses it. */
function paths(snapshot) {
  const users = new Map();
  for (const [from, to] of snapshot.links) {
    if (snapshot.nodes[to].kind !== "leaf") continue;
    if (!users.has(to)) users.set(to, new Set());
    users.get(to).add(snapshot.nodes[from].module);
  }
  return snapshot.nodes.map((node, index) => {
    const own = node.kind === "leaf" ? users.get(index) ?? new Set() : new Set([node.module]);
    const [module] = own;
    return own.size === 1 && module && node.kind !== "receive" ? module.split(".") : [];
  });
}

const prefix = (snapshot, index, path, depth) => `${snapshot.nodes[index].w} ${path.slice(0, depth).join(".")}`;

/** How far down the modules are shown at first: as far as there is room. */
function depthOf(snapshot, paths) {
  const deepest = Math.max(1, ...paths.map((path) => path.length));
  for (let depth = deepest; depth > 1; depth -= 1) {
    const seen = new Set(paths.map((path, index) => (path.length ? prefix(snapshot, index, path, depth) : index)));
    if (seen.size <= BOXES) return depth;
  }
  return 1;
}

/** The boxes to draw: nodes, and groups of those of one module on one worker; who is expanded shows what is in it. */
export function boxes(snapshot, expanded, grouped) {
  const found = [];
  const of = new Array(snapshot.nodes.length);
  const groups = new Map();
  const known = paths(snapshot);
  const first = grouped ? depthOf(snapshot, known) : 0;
  snapshot.nodes.forEach((node, index) => {
    const path = grouped ? known[index] : [];
    let depth = Math.min(first, path.length);
    while (depth && depth < path.length && expanded.has(prefix(snapshot, index, path, depth))) depth += 1;
    const key = prefix(snapshot, index, path, depth);
    if (depth && !(depth === path.length && expanded.has(key))) {
      if (!groups.has(key)) {
        groups.set(key, found.length);
        found.push({ id: key, w: node.w, nodes: [], group: path.slice(0, depth).join(".") });
      }
      of[index] = groups.get(key);
      found[of[index]].nodes.push(index);
    } else {
      of[index] = found.length;
      found.push({ id: `${node.w}:${node.n}`, w: node.w, nodes: [index], group: null });
    }
  });
  // A group of which something leads out and back in again cannot be one box.
  const links = new Map();
  const add = (from, to, message) => {
    if (of[from] === of[to]) return;
    const key = `${of[from]} ${of[to]} ${message ? message.index : ""}`;
    if (!links.has(key)) links.set(key, { from: of[from], to: of[to], message: message ?? null });
  };
  for (const [from, to] of snapshot.links) add(from, to);
  for (const message of snapshot.messages) add(message.from, message.to, message);
  return { boxes: found, links: [...links.values()] };
}

/** How far to the right each box stands: one further than all whose gradients it gets. Circles are cut. */
export function ranks(count, links) {
  const before = Array.from({ length: count }, () => []);
  for (const { from, to } of links) before[to].push(from);
  const rank = new Array(count);
  const open = new Set();
  for (let start = 0; start < count; start += 1) {
    const stack = [start];
    while (stack.length) {
      const box = stack[stack.length - 1];
      if (rank[box] !== undefined) {
        stack.pop();
        continue;
      }
      const missing = before[box].filter((other) => rank[other] === undefined && !open.has(other));
      open.add(box);
      if (missing.length) {
        stack.push(...missing);
        continue;
      }
      rank[box] = Math.max(-1, ...before[box].map((other) => rank[other] ?? -1)) + 1;
      open.delete(box);
      stack.pop();
    }
  }
  return rank;
}

/** How far down each box stands beside others, so that few links cross: dagre says that, where it is quick. */
export function heights(count, links, rank) {
  return count > MOST ? swept(count, links, rank) : laid(count, links);
}

function laid(count, links) {
  const graph = new dagre.Graph({ multigraph: true });
  // What counts is the order: one of the four alignments will do, in half the time. And of a parameter that is used
  // early, the link must not lead through all that comes later.
  graph.setGraph({ rankdir: "LR", nodesep: GAP.row, ranksep: GAP.rank, ranker: "tight-tree", align: "UL" });
  graph.setDefaultEdgeLabel(() => ({}));
  for (let index = 0; index < count; index += 1) graph.setNode(String(index), { ...BOX });
  links.forEach((link, index) => graph.setEdge(String(link.from), String(link.to), {}, String(index)));
  dagre.layout(graph);
  return Array.from({ length: count }, (_, index) => graph.node(String(index)).y);
}

/** The same for many, in less time: each column in the order of what leads to it, and of what it leads to, by turns. */
function swept(count, links, rank) {
  const before = Array.from({ length: count }, () => []);
  const after = Array.from({ length: count }, () => []);
  for (const { from, to } of links) {
    before[to].push(from);
    after[from].push(to);
  }
  const columns = [];
  const place = new Array(count);
  for (let index = 0; index < count; index += 1) {
    columns[rank[index]] ??= [];
    place[index] = columns[rank[index]].push(index) - 1;
  }
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    const forth = sweep % 2 === 0;
    for (const column of forth ? columns : columns.toReversed()) {
      const wish = new Map();
      for (const index of column) {
        const others = (forth ? before : after)[index];
        const sum = others.reduce((total, other) => total + place[other], 0);
        wish.set(index, others.length ? sum / others.length : place[index]);
      }
      column.sort((one, other) => wish.get(one) - wish.get(other));
      column.forEach((index, at) => {
        place[index] = at;
      });
    }
  }
  return place;
}

/** Lanes and places: what dagre has found, pulled apart by worker. */
export function layout(snapshot, expanded = new Set(), grouped = snapshot.nodes.length > MOST) {
  const { boxes: found, links } = boxes(snapshot, expanded, grouped);
  const column = ranks(found.length, links);
  const height = found.length ? heights(found.length, links, column) : [];
  const lanes = [];
  const places = new Array(found.length);
  let top = 0;
  snapshot.workers.forEach((worker, number) => {
    const own = found.map((box, index) => index).filter((index) => found[index].w === number);
    own.sort((a, b) => height[a] - height[b]);
    const used = new Map();
    for (const index of own) {
      const at = column[index];
      const row = used.get(at) ?? 0;
      used.set(at, row + 1);
      places[index] = {
        x: NAME + at * (BOX.width + GAP.rank),
        y: top + GAP.lane / 2 + row * (BOX.height + GAP.row),
      };
    }
    const rows = Math.max(1, ...used.values());
    const tall = GAP.lane + rows * (BOX.height + GAP.row) - GAP.row;
    lanes.push({ worker, top, height: tall });
    top += tall;
  });
  const width = NAME + (Math.max(0, ...column) + 1) * (BOX.width + GAP.rank);
  return { boxes: found, links, places, lanes, width, height: top };
}

/** How far a box is: that of its one node, or of a group the state that matters most. */
export function stateOf(box, snapshot) {
  const states = new Set(box.nodes.map((index) => snapshot.nodes[index].state));
  for (const state of ["halted", "running"]) if (states.has(state)) return state;
  if (states.size === 1) return [...states][0];
  states.delete("unused");
  if (states.size === 1) return [...states][0];
  return states.has("done") ? "partly" : states.has("ready") ? "ready" : "waiting";
}

/** What stands in a box. */
export function label(box, snapshot) {
  const [first] = box.nodes;
  const text = box.group ? `${box.group.split(".").slice(-2).join(".")} (${box.nodes.length})` : snapshot.nodes[first].name;
  return text.length > 17 ? `${text.slice(0, 16)}…` : text;
}

/** The count below it: how many gradients have come, and for whom it waits. */
export function count(box, snapshot) {
  if (box.group) {
    const done = box.nodes.filter((index) => snapshot.nodes[index].state === "done").length;
    return `${done}/${box.nodes.length} done`;
  }
  const node = snapshot.nodes[box.nodes[0]];
  if (node.state === "unused") return "takes no part";
  if (node.state === "done") return node.ms === null ? "done" : `${time(node.ms)}`;
  const waits = node.for.length ? ` waits for ${node.for.join(", ")}` : "";
  return node.waits ? `${node.got}/${node.waits}${waits}` : node.state;
}

/** All that is known of a node, as rows of a name and a text. */
export function details(node, worker) {
  const rows = [["node", `${worker}:${node.n} ${node.name}`]];
  if (node.module) rows.push(["module", node.module]);
  if (node.line) rows.push(["made by", node.line]);
  if (node.shape) rows.push(["shape", node.shape]);
  rows.push(["state", node.for.length ? `${node.state} for ${node.for.join(", ")}` : node.state]);
  if (node.waits) rows.push(["gradients", `${node.got} of ${node.waits} have come`]);
  if (node.norm !== null) {
    // What is not finite comes as text, for JSON knows no such numbers.
    rows.push(["norm of what it got", typeof node.norm === "number" ? node.norm.toPrecision(5) : node.norm]);
  }
  if (node.ms !== null) rows.push(["time", time(node.ms)]);
  if (node.bad) rows.push(["", "here a NaN or Inf came up first"]);
  return rows;
}
