// How far to the right boxes stand: ranks along the links, and the circles that would make that impossible. Pure.

/** Returns the rank of each box: that of the last one before it, and the link's `step` more. Circles are cut. */
export function ranks(count, links, step = () => 1) {
  const before = Array.from({ length: count }, () => []);
  for (const link of links) before[link.to].push(link);
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
      const missing = before[box].filter(({ from }) => rank[from] === undefined && !open.has(from));
      open.add(box);
      if (missing.length) {
        stack.push(...missing.map(({ from }) => from));
        continue;
      }
      const known = before[box].filter(({ from }) => rank[from] !== undefined);
      rank[box] = Math.max(0, ...known.map((link) => rank[link.from] + step(link)));
      open.delete(box);
      stack.pop();
    }
  }
  return rank;
}

/** Returns the sets of boxes, of two or more, of which each can be reached from each (Tarjan's algorithm). */
export function circles(count, links) {
  const after = Array.from({ length: count }, () => []);
  for (const { from, to } of links) after[from].push(to);
  const number = new Array(count);
  const low = new Array(count);
  const inside = new Array(count).fill(false);
  const found = [];
  const path = [];
  let next = 0;
  for (let start = 0; start < count; start += 1) {
    const stack = number[start] === undefined ? [[start, 0]] : [];
    while (stack.length) {
      const top = stack[stack.length - 1];
      const [box, at] = top;
      if (!at) {
        number[box] = low[box] = next;
        next += 1;
        inside[box] = true;
        path.push(box);
      }
      if (at < after[box].length) {
        const other = after[box][at];
        top[1] += 1;
        if (number[other] === undefined) stack.push([other, 0]);
        else if (inside[other]) low[box] = Math.min(low[box], number[other]);
        continue;
      }
      stack.pop();
      if (stack.length) {
        const [parent] = stack[stack.length - 1];
        low[parent] = Math.min(low[parent], low[box]);
      }
      if (low[box] === number[box]) {
        const members = path.splice(path.lastIndexOf(box));
        for (const member of members) inside[member] = false;
        if (members.length > 1) found.push(members);
      }
    }
  }
  return found;
}
