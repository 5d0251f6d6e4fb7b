// What a view of a backward pass shows: the boxes, which hold one node or a module's, and the texts on them. Pure.

import { time } from "./amounts.js";
import { circles, ranks } from "./ranks.js";

export const MOST = 300; // passes with more nodes are shown by module at first,
const BOXES = 64; // in no more boxes than this, if modules of modules are enough for that
const LETTERS = { name: 16, hung: 14, count: 20 }; // as many as a box has room for

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
    ...(snapshot.gpu ? { gpu: snapshot.gpu[index] } : {}),
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

/** Returns the boxes to draw, nodes and groups of a module's nodes on one worker, and the links between the boxes.

    A group whose id is in `expanded` shows what is in it. A box has a `key`, by which its group is expanded. */
export function boxes(snapshot, expanded, grouped) {
  const known = paths(snapshot);
  const first = grouped ? depthOf(snapshot, known) : 0;
  let found = [];
  const groups = new Map();
  snapshot.nodes.forEach((node, index) => {
    const path = grouped ? known[index] : [];
    let depth = Math.min(first, path.length);
    while (depth && depth < path.length && expanded.has(prefix(snapshot, index, path, depth))) depth += 1;
    const key = prefix(snapshot, index, path, depth);
    if (!depth || (depth === path.length && expanded.has(key))) {
      found.push(single(snapshot, index));
      return;
    }
    if (!groups.has(key)) {
      groups.set(key, { id: key, key, w: node.w, nodes: [], group: path.slice(0, depth).join(".") });
      found.push(groups.get(key));
    }
    groups.get(key).nodes.push(index);
  });
  if (grouped) found = unwound(snapshot, found);
  return { boxes: found, links: between(snapshot, found) };
}

function single(snapshot, index) {
  const { w, n } = snapshot.nodes[index];
  return { id: `${w}:${n}`, key: `${w}:${n}`, w, nodes: [index], group: null };
}

/** The links between boxes: one for all links of their nodes, and one for each message. */
function between(snapshot, found) {
  const of = new Array(snapshot.nodes.length);
  found.forEach((box, index) => {
    for (const node of box.nodes) of[node] = index;
  });
  const links = new Map();
  const add = (from, to, message) => {
    if (of[from] === of[to]) return;
    const key = `${of[from]} ${of[to]} ${message ? message.index : ""}`;
    if (!links.has(key)) links.set(key, { from: of[from], to: of[to], message: message ?? null });
  };
  for (const [from, to] of snapshot.links) add(from, to);
  for (const message of snapshot.messages) add(message.from, message.to, message);
  return [...links.values()];
}

/** The same boxes, but a group that gradients leave and enter again is cut there: it cannot stand in one place.

    Of the groups in a circle those of the outermost modules are cut first: they hold what joins the others. */
function unwound(snapshot, found) {
  const order = unfolded(snapshot);
  let left = found;
  for (;;) {
    const cut = new Map();
    for (const circle of circles(left.length, between(snapshot, left))) {
      const inOrder = circle.flatMap((index) => left[index].nodes.map((node) => [order[node], node, index]));
      inOrder.sort(([one], [other]) => one - other);
      const runs = new Map(circle.map((index) => [index, []]));
      inOrder.forEach(([, node, index], at) => {
        if (at && inOrder[at - 1][2] === index) runs.get(index).at(-1).push(node);
        else runs.get(index).push([node]);
      });
      const torn = circle.filter((index) => runs.get(index).length > 1);
      const depths = torn.map((index) => left[index].group.split(".").length);
      torn.forEach((index, at) => {
        if (depths[at] === Math.min(...depths)) cut.set(index, runs.get(index));
      });
    }
    if (!cut.size) return left;
    left = left.flatMap((box, index) =>
      (cut.get(index) ?? [box.nodes]).map((nodes, run) => {
        if (!cut.has(index)) return box;
        return nodes.length === 1 ? single(snapshot, nodes[0]) : { ...box, id: `${box.id}/${run}`, nodes };
      }),
    );
  }
}

/** Returns the place of each node in an order in which gradients go; a parameter's comes right behind what made it. */
function unfolded(snapshot) {
  const links = snapshot.links.map(([from, to]) => ({ from, to }));
  const rank = ranks(snapshot.nodes.length, [...links, ...snapshot.messages]);
  const after = (one, other) => rank[one] - rank[other] || one - other;
  const makers = snapshot.nodes.map((_, index) => index);
  for (const { from, to } of links) {
    if (snapshot.nodes[to].kind === "leaf" && (makers[to] === to || after(from, makers[to]) > 0)) makers[to] = from;
  }
  for (const { from, to } of snapshot.messages) if (after(from, makers[to]) > 0) makers[to] = to;
  const order = new Array(snapshot.nodes.length);
  makers.map((_, index) => index)
    .sort((one, other) => after(makers[one], makers[other]) || after(one, other))
    .forEach((index, at) => {
      order[index] = at;
    });
  return order;
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

/** What stands in a box: of modules and parameters, the end of their names, where they differ. */
export function label(box, snapshot) {
  if (box.group) return tail(`${ending(box.group)} (${box.nodes.length})`, LETTERS.name);
  const { name, label: parameter, kind } = snapshot.nodes[box.nodes[0]];
  const letters = kind === "operation" ? LETTERS.name : LETTERS.hung;
  if (parameter) return tail(ending(parameter), letters);
  return head(name, letters);
}

const ending = (path) => path.split(".").slice(-2).join(".");

const head = (text, letters) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text);

const tail = (text, letters) => (text.length > letters ? `…${text.slice(1 - letters)}` : text);

/** The count below it: how many gradients have come, and for whom it waits. */
export function count(box, snapshot) {
  if (box.group) {
    const done = box.nodes.filter((index) => snapshot.nodes[index].state === "done").length;
    return `${done}/${box.nodes.length} done`;
  }
  const node = snapshot.nodes[box.nodes[0]];
  if (node.state === "unused") return "takes no part";
  if (node.state === "done") return node.ms === null ? "done" : `${time(node.ms)}`;
  if (!node.waits) return node.state;
  const come = `${node.got}/${node.waits}`;
  if (node.state === "halted") return `${come}, halted`;
  if (!node.for.length) return come;
  const names = `${come} awaits ${node.for.join(", ")}`;
  if (names.length <= LETTERS.count || node.for.length === 1) return head(names, LETTERS.count);
  return head(`${come} awaits ${node.for.length} workers`, LETTERS.count);
}

/** All that is known of a node, as rows of a name and of parts: texts, and links to nodes, `{ text, node }`. */
export function details(snapshot, index) {
  const node = snapshot.nodes[index];
  const rows = [["node", [`${snapshot.workers[node.w]}:${node.n} ${node.name}`]]];
  if (node.label) rows.push(["parameter", [node.label]]);
  if (node.module) rows.push(["module", [node.module]]);
  if (node.line) rows.push(["made by", [node.line]]);
  for (const [word, told] of node.notes ?? []) rows.push([word, [told]]);
  if (node.shape) rows.push(["shape", [node.shape]]);
  rows.push(["state", [node.for.length ? `${node.state} for ${node.for.join(", ")}` : node.state]]);
  if (node.waits) rows.push(["gradients", [`${node.got} of ${node.waits} have come`]]);
  for (const message of snapshot.messages) {
    const what = snapshot.nodes[message.from].kind === "receive" ? "its gradient" : "its result";
    if (message.from === index) rows.push([`${what} goes to`, across(snapshot, message.to, message)]);
  }
  for (const message of snapshot.messages) {
    const what = snapshot.nodes[message.from].kind === "receive" ? "a gradient" : "what it needs";
    if (message.to === index) rows.push([`${what} comes from`, across(snapshot, message.from, message)]);
  }
  if (node.norm !== null) {
    // What is not finite comes as text, for JSON knows no such numbers.
    rows.push(["norm of what it got", [typeof node.norm === "number" ? node.norm.toPrecision(5) : node.norm]]);
  }
  if (node.ms !== null) rows.push(["time", [`${time(node.ms)}${(node.gpu ?? null) === null ? "" : `, GPU ${time(node.gpu)}`}`]]);
  if (node.bad) rows.push(["", ["here a NaN or Inf came up first"]]);
  return rows;
}

function across(snapshot, index, message) {
  const { n, w, name } = snapshot.nodes[index];
  const state = message.state === "unused" ? ", which takes no part" : "";
  return [{ text: `node ${n} ${name} on ${snapshot.workers[w]}`, node: index }, state];
}
