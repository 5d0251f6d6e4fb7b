// A line of the last values, the bars of a histogram, and who talks to whom. Pure.

import { bytes } from "./amounts.js";

/** The points of a line through values, the newest at the right, for a box of this size. */
export function points(values, width, height, most) {
  const top = Math.max(most ?? 0, ...values, Number.MIN_VALUE);
  const step = width / Math.max(1, values.length - 1);
  return values.map((value, index) => `${(index * step).toFixed(1)},${(height - (value / top) * height).toFixed(1)}`).join(" ");
}

/** The bars of a histogram, for a box of this size: the tallest as high as the box, none that counts too low to be seen. */
export function bars(counts, width, height) {
  const most = Math.max(1, ...counts);
  const step = width / Math.max(1, counts.length);
  return counts.map((count, index) => {
    const tall = count ? Math.max(1, (count / most) * height) : 0;
    return { x: index * step, y: height - tall, width: Math.max(1, step - 1), height: tall };
  });
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
