// Texts in which nodes are named, each a link to its node: remarks, and what is told of a node.

import { element } from "./buttons.js";

/** Fills an element, if there is anything new, and returns what does so; what is there keeps the focus as long. */
export function filler(parent, make) {
  let shown = null;
  return (data) => {
    const text = JSON.stringify(data);
    if (text === shown) return;
    shown = text;
    parent.replaceChildren(...make(data));
  };
}

/** The elements for parts: texts, and `{ text, node }`, whose press calls `go(node)`. */
export function linked(parts, go) {
  return parts.map((part) => {
    if (typeof part === "string") return document.createTextNode(part);
    const made = element("button", "nbdist-link", part.text);
    made.type = "button";
    made.title = "Show this node in the picture";
    made.onclick = () => go(part.node);
    return made;
  });
}
