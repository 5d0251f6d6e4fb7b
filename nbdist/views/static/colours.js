// Colours for quantities, each with an ink that reads on it. Pure.

import { time } from "./amounts.js";

const STOPS = ["#f3f0d7", "#f5d08a", "#f0a06a", "#d96a6f", "#a0427f", "#5c2a73"]; // from little to much

const parts = (colour) => [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));

/** Returns the colour of a value from 0 to 1. In the dark much is light, so that it stands out there too. */
export function ramp(value, dark) {
  const at = Math.min(1, Math.max(0, dark ? 1 - value : value)) * (STOPS.length - 1);
  const low = Math.min(STOPS.length - 2, Math.floor(at));
  const [from, to] = [parts(STOPS[low]), parts(STOPS[low + 1])];
  const mixed = from.map((part, index) => Math.round(part + (to[index] - part) * (at - low)));
  return `#${mixed.map((part) => part.toString(16).padStart(2, "0")).join("")}`;
}

/** How light a colour is, from 0 to 1 (WCAG's relative luminance). */
export function lightness(colour) {
  const [red, green, blue] = parts(colour).map((part) => {
    const value = part / 255;
    return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** Black or white, which reads better on a colour: the contrast is 4.5 or more, on whatever colour. */
export function ink(colour) {
  return lightness(colour) > 0.179 ? "#000000" : "#ffffff";
}

/** What a box holds of a quantity: the time of all its nodes, or the largest norm; null where nothing is known. */
export function quantity(box, snapshot, what) {
  const known = box.nodes
    .map((index) => snapshot.nodes[index][what === "time" ? "ms" : "norm"])
    .filter((value) => value !== null && value !== undefined);
  if (!known.length) return null;
  if (what === "time") return known.reduce((sum, value) => sum + value, 0);
  const numbers = known.filter((value) => typeof value === "number");
  return numbers.length < known.length ? Infinity : Math.max(...numbers);
}

/** An amount for people. */
export function amountText(value, what) {
  if (what === "time") return time(value);
  return value === Infinity ? "not finite" : value.toPrecision(3);
}

/** The scale on which quantities stand: their range, and where in it, from 0 to 1, a value is. Far apart: by powers. */
export function scale(values) {
  const found = values.filter((value) => Number.isFinite(value));
  if (!found.length) return null;
  const positive = found.filter((value) => value > 0);
  const [low, high] = [Math.min(...found), Math.max(...found)];
  const least = positive.length ? Math.min(...positive) : low;
  const powers = least > 0 && high / least > 30;
  const at = (value) => {
    if (value >= high) return 1;
    if (value <= low || (powers && value <= least)) return 0;
    return powers ? Math.log(value / least) / Math.log(high / least) : (value - low) / (high - low);
  };
  return { low, high, powers, at };
}
