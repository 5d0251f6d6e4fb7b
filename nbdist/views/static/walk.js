// Where an arrow key leads in the picture: left and right along the links, up and down in a column. Pure.

/** Returns the index of the box to which a key leads from another box, or that same index. */
export function walk(found, at, key) {
  const place = (index) => found.places[index];
  const nearest = (boxes) =>
    boxes.toSorted((one, other) => Math.abs(place(one).y - place(at).y) - Math.abs(place(other).y - place(at).y))[0];
  const order = found.boxes.map((_, index) => index);
  if (key === "Home" || key === "End") {
    order.sort((one, other) => found.column[one] - found.column[other] || place(one).y - place(other).y);
    return order.at(key === "Home" ? 0 : -1) ?? at;
  }
  if (key === "ArrowUp" || key === "ArrowDown") {
    const way = key === "ArrowUp" ? -1 : 1;
    const beyond = (index) => (place(index).y - place(at).y) * way > 0;
    return nearest(order.filter((index) => found.column[index] === found.column[at] && beyond(index))) ?? at;
  }
  const ends = found.links
    .filter((link) => (key === "ArrowRight" ? link.from : link.to) === at)
    .map((link) => (key === "ArrowRight" ? link.to : link.from));
  const away = ends.filter((index) => found.column[index] !== found.column[at]);
  const same = ends.filter((index) => found.boxes[index].w === found.boxes[at].w);
  const both = away.filter((index) => same.includes(index));
  return nearest([both, away, ends].find((boxes) => boxes.length) ?? []) ?? at;
}
