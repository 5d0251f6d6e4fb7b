// A line of the last values. Pure.

/** The points of a line through values, the newest at the right, for a box of this size. */
export function points(values, width, height, most) {
  const top = Math.max(most ?? 0, ...values, Number.MIN_VALUE);
  const step = width / Math.max(1, values.length - 1);
  return values.map((value, index) => `${(index * step).toFixed(1)},${(height - (value / top) * height).toFixed(1)}`).join(" ");
}

/** Who waits for whom, as lines of text. */
export function talk(rows) {
  const found = [];
  for (const row of rows) {
    for (const [other, count] of Object.entries(row.waits)) {
      found.push(`${row.name} → ${other}: ${count} ${count === 1 ? "call" : "calls"}`);
    }
  }
  return found;
}

export function megabytes(bytes) {
  return `${Math.round(bytes / 1048576)} MB`;
}
