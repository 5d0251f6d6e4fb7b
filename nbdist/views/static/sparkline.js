// A line of the last values, and who talks to whom. Pure.

import { bytes } from "./amounts.js";

/** The points of a line through values, the newest at the right, for a box of this size. */
export function points(values, width, height, most) {
  const top = Math.max(most ?? 0, ...values, Number.MIN_VALUE);
  const step = width / Math.max(1, values.length - 1);
  return values.map((value, index) => `${(index * step).toFixed(1)},${(height - (value / top) * height).toFixed(1)}`).join(" ");
}

/** Who talks to whom, as lines of text. */
export function talk(pairs) {
  return pairs.map(({ from, to, calls, rate }) => {
    const parts = [];
    if (calls) parts.push(`${calls} ${calls === 1 ? "call" : "calls"}`);
    if (rate >= 10_000) parts.push(`${bytes(rate)}/s`);
    return `${from} → ${to}: ${parts.join(", ")}`;
  });
}
