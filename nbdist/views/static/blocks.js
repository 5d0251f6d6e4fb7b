// Which blocks are with whom, where they are drawn, and how that is said. Pure.

import { bytes } from "./amounts.js";

const SERVING = ["online", "draining"]; // who is in another state has its blocks for nobody
export const HEIGHT = 16;
const WIDE = 300; // pixels for all blocks, if that leaves each enough to be seen
const NUMBER = 24; // pixels for the number of a block

const counted = (count, noun) => `${count} ${count === 1 ? noun : `${noun}s`}`;

function runs(numbers, kindOf) {
  const found = [];
  for (const number of numbers) {
    const kind = kindOf(number);
    const last = found.at(-1);
    if (last && last.end === number && last.kind === kind) last.end += 1;
    else found.push({ begin: number, end: number + 1, kind });
  }
  return found;
}

const numbersOf = (spans) => spans.flatMap(([begin, end]) => Array.from({ length: end - begin }, (_, index) => begin + index));

/** What is drawn of a worker: blocks that follow each other and look alike. */
export function parts(server, route, over = false) {
  if (server.state === "gone") return [];
  if (over) return runs(numbersOf(server.blocks), () => "was");
  const serves = SERVING.includes(server.state);
  const way = new Set(numbersOf(route.filter(([name]) => name === server.name).map(([, begin, end]) => [begin, end])));
  return runs(numbersOf(server.blocks), (number) => (!serves ? "away" : way.has(number) ? "route" : "held"));
}

/** The blocks that nobody has; of a swarm that is over, nobody misses any. */
export function missing(snapshot) {
  if (snapshot.over) return [];
  const held = new Set(snapshot.servers.filter((server) => SERVING.includes(server.state)).flatMap((server) => numbersOf(server.blocks)));
  return runs(numbersOf([[0, snapshot.count]]).filter((number) => !held.has(number)), () => "missing");
}

/** How wide one block is. */
export function cellOf(count) {
  return Math.max(4, Math.min(30, Math.floor(WIDE / Math.max(1, count))));
}

/** Where a part is drawn. What a session goes through is taller: it is not told by the colour alone. */
export function box(part, cell) {
  const inset = part.kind === "route" || part.kind === "missing" ? 0 : 3;
  return { x: part.begin * cell, y: inset, width: (part.end - part.begin) * cell, height: HEIGHT - 2 * inset };
}

/** The numbers that stand above the blocks, as many as there is room for. */
export function ruler(count, cell) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200].find((each) => each * cell >= NUMBER) ?? 500;
  const found = [];
  for (let number = 0; number < count; number += step) found.push({ number, x: (number + 0.5) * cell });
  return found;
}

/** Lines between the blocks. */
export function grid(count, cell) {
  return Array.from({ length: Math.max(0, count - 1) }, (_, index) => `M${(index + 1) * cell} 0V${HEIGHT}`).join("");
}

/** Blocks in a row, shortly. */
export function ranges(spans) {
  return spans.map(({ begin, end }) => (end - begin === 1 ? `${begin}` : `${begin}-${end - 1}`)).join(", ");
}

/** The same with a noun. */
export function blocksTold(spans) {
  const one = spans.length === 1 && spans[0].end - spans[0].begin === 1;
  return spans.length ? `${one ? "block" : "blocks"} ${ranges(spans)}` : "no blocks";
}

/** What a row says to whoever does not see it. */
export function rowTold(server, own) {
  const way = own.filter((part) => part.kind === "route");
  const had = blocksTold(server.blocks.map(([begin, end]) => ({ begin, end })));
  return `${server.name}: ${had}${way.length ? `; on the session's route ${ranges(way)}` : ""}`;
}

/** The line above all. */
export function headTold(snapshot) {
  const all = [`${counted(snapshot.count, "block")}, ${bytes(snapshot.bytes)}`, counted(snapshot.servers.length, "worker")];
  if (snapshot.over) return `this swarm is over; it had ${all[0]}, and ${all[1]}`;
  const counts = new Map();
  for (const { state } of snapshot.servers) counts.set(state, (counts.get(state) ?? 0) + 1);
  const states = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
  const lost = missing(snapshot);
  return `${all.join("; ")}${states ? `: ${states}` : ""}${lost.length ? `; nobody has ${blocksTold(lost)}` : ""}`;
}

/** The session that last took a step, and its way. */
export function sessionTold({ session, route, over }) {
  const lines = [];
  if (over) return "";
  if (session) {
    const told = [session.state, counted(session.tokens, "token")];
    if (session.rate && session.state !== "idle") told.push(`${session.rate.toFixed(1)} tokens/s`);
    lines.push(`session ${session.id}: ${told.join(", ")}`);
  }
  if (route.length) lines.push(`route: ${route.map(([name, begin, end]) => `${name} ${ranges([{ begin, end }])}`).join(" → ")}`);
  return lines.join("\n");
}

/** What there is to be said of single workers; most of it names them. */
export function notesTold(servers) {
  const told = servers.filter(({ note }) => note);
  return told.map(({ name, note }) => (note.startsWith(name) ? note : `${name}: ${note}`)).join("\n");
}

/** How full a worker's caches are: a share where there is a limit, and words. */
export function fill({ state, cache, budget }) {
  if (state === "gone") return { share: null, told: "" };
  if (budget === null) return { share: null, told: bytes(cache) };
  return { share: budget > 0 ? Math.min(1, cache / budget) : 1, told: `${bytes(cache)} of ${bytes(budget)}` };
}

/** A time of day, where the page is. */
export function clock(seconds) {
  const date = new Date(seconds * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}
