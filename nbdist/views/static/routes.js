// The lines between boxes: they pass between columns and between rows, and through no box. Pure.

import { BOX, GAP } from "./layout.js";

/** Returns what draws the lines of a layout, as path data, by the index of the link. */
export function routes(found) {
  const columns = [];
  found.places.forEach((place, index) => (columns[found.column[index]] ??= []).push(place.y + BOX.height / 2));
  /** Whether a line at this height meets no box of the columns in between. */
  const isFree = (y, first, end) => {
    for (let at = first; at < end; at += 1) {
      if (columns[at]?.some((other) => Math.abs(other - y) < BOX.height / 2 + 2)) return false;
    }
    return true;
  };
  return found.links.map((link, index) => {
    const from = found.places[link.from];
    const to = found.places[link.to];
    const [x1, y1] = [from.x + from.width, from.y + BOX.height / 2];
    const [x2, y2] = [to.x, to.y + BOX.height / 2];
    const [one, other] = [found.column[link.from], found.column[link.to]];
    if (found.host[link.to] === link.from) return `M${from.x + 4} ${from.y + BOX.height} V${y2} H${x2}`;
    if (one === other) {
      const side = to.x + to.width;
      const out = Math.max(x1, side) + GAP.rank * 0.7;
      return `M${x1} ${y1} C${out} ${y1} ${out} ${y2} ${side} ${y2}${link.message ? arrow(side, y2, 1) : ""}`;
    }
    const tip = link.message ? arrow(x2, y2, -1) : "";
    // Where it turns: between the columns, behind the box that it comes from, and before the one that it goes to.
    const [left, right] = [x1 + GAP.rank, x2 - GAP.rank];
    if (other > one && isFree(y1, one + 1, other)) return `M${x1} ${y1} H${right}${bend(right, y1, x2, y2)}${tip}`;
    if (other > one && isFree(y2, one + 1, other)) return `M${x1} ${y1}${bend(x1, y1, left, y2)} H${x2}${tip}`;
    const lane = found.lanes[found.boxes[link.from].w];
    const y = passage(lane, (y1 + y2) / 2) + (index % 3) - 1;
    return `M${x1} ${y1}${bend(x1, y1, left, y)} H${right}${bend(right, y, x2, y2)}${tip}`;
  });
}

function bend(x1, y1, x2, y2) {
  if (y1 === y2) return ` H${x2}`;
  const middle = (x1 + x2) / 2;
  return ` C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}

/** The height, between two rows of a lane or at its edge, that is nearest to another. */
function passage(lane, wanted) {
  const step = BOX.height + GAP.row;
  const first = lane.top + GAP.lane / 2 - GAP.row / 2;
  const rows = Math.round((lane.height - GAP.lane + GAP.row) / step);
  return first + step * Math.min(rows, Math.max(0, Math.round((wanted - first) / step)));
}

function arrow(x, y, way) {
  return ` M${x + way * 5} ${y - 4} L${x} ${y} L${x + way * 5} ${y + 4}`;
}
