// Where the boxes of a backward pass stand: lanes by worker, gradients from left to right. Pure.
//
//     worker1   │          ┌ Relu ┐──┌ Addmm ┐──┌ T ┐
//               │         ╱          ├ fc.bias      └ fc.weight     a parameter, and a receive, hang below the node
//               │        ╱           └ receive ╲                    that gives them their gradient
//     notebook  │ Loss  ╱                       ╲
//               │ └ receive                receive ...              one that only passes on stands below its sender

import * as dagre from "./dagre.js";
import { boxes, MOST } from "./graph.js";
import { ranks } from "./ranks.js";

export const BOX = { width: 104, height: 30 };
export const HANG = 9; // what hangs below another box is narrower by this
export const GAP = { rank: 18, row: 8, lane: 12 };
const SWEEPS = 6;

/** How far down each box stands beside others, so that few links cross: dagre says that, where it is quick. */
function heights(count, links, rank) {
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

/** Returns the column of each box, and below which box of its column it hangs, or -1. */
function standing(snapshot, found, links) {
  const kinds = found.map((box) => (box.group ? "group" : snapshot.nodes[box.nodes[0]].kind));
  const near = (link) => !link.message && found[link.from].w === found[link.to].w;
  const fed = new Set(links.filter(near).map((link) => link.to));
  const hangs = (link) => near(link) && (kinds[link.to] === "leaf" || kinds[link.to] === "receive");
  const passedOn = (link) => link.message && kinds[link.to] === "receive" && !fed.has(link.to);
  const column = ranks(found.length, links, (link) => (hangs(link) || passedOn(link) ? 0 : 1));
  const host = new Array(found.length).fill(-1);
  for (const link of links) if (hangs(link) && column[link.from] === column[link.to]) host[link.to] = link.from;
  return { column, host };
}

/** Returns the row in its lane of each box of one lane. What hangs comes right below its host. */
function rowsOf(own, column, host, height, sources) {
  const hung = new Map();
  const columns = [];
  for (const index of own) {
    if (host[index] < 0) (columns[column[index]] ??= []).push(index);
    else hung.set(host[index], [...(hung.get(host[index]) ?? []), index]);
  }
  const row = new Map();
  for (const each of columns.filter(Boolean)) {
    // A box stands in the row of what leads to it, if the order of the column lets it.
    const wish = each.map((index) => {
      const known = sources[index].map((other) => row.get(other)).filter((at) => at !== undefined);
      return known.length ? Math.min(...known) : 0;
    });
    for (let at = each.length - 2; at >= 0; at -= 1) wish[at] = Math.min(wish[at], wish[at + 1]);
    let free = 0;
    each.forEach((index, at) => {
      free = Math.max(free, wish[at]);
      for (const one of [index, ...(hung.get(index) ?? [])]) {
        row.set(one, free);
        free += 1;
      }
    });
  }
  return row;
}

/** Returns boxes and links, the place of each box, its column and host, and the lanes. */
export function layout(snapshot, expanded = new Set(), grouped = snapshot.nodes.length > MOST) {
  const { boxes: found, links } = boxes(snapshot, expanded, grouped);
  const { column, host } = standing(snapshot, found, links);
  const height = found.length ? heights(found.length, links, column) : [];
  const sources = found.map(() => []);
  for (const link of links) if (found[link.from].w === found[link.to].w) sources[link.to].push(link.from);
  // Receives last: from there lines go on to other lanes.
  const last = found.map((box) => !box.group && snapshot.nodes[box.nodes[0]].kind === "receive");
  const lanes = [];
  const places = new Array(found.length);
  let top = 0;
  snapshot.workers.forEach((worker, number) => {
    const own = found.map((_, index) => index).filter((index) => found[index].w === number);
    own.sort((one, other) => last[one] - last[other] || height[one] - height[other]);
    const rows = rowsOf(own, column, host, height, sources);
    for (const [index, row] of rows) {
      const hang = host[index] >= 0 ? HANG : 0;
      places[index] = {
        x: GAP.rank / 2 + column[index] * (BOX.width + GAP.rank) + hang,
        y: top + GAP.lane / 2 + row * (BOX.height + GAP.row),
        width: BOX.width - hang,
      };
    }
    const count = Math.max(0, ...rows.values()) + 1;
    const tall = GAP.lane + count * (BOX.height + GAP.row) - GAP.row;
    lanes.push({ worker, top, height: tall });
    top += tall;
  });
  const width = (Math.max(0, ...column) + 1) * (BOX.width + GAP.rank);
  return { boxes: found, links, places, column, host, lanes, width, height: top };
}
