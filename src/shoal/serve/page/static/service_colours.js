// A number and a colour for each service, by its position in the list of services.

import { el, setAttribute, setText } from "./dom.js";

const COLOURS = 12;
const positions = new Map();

/** Positions are kept while the page is open, so that a service keeps its colour when others go. */
export function learnServices(services) {
  for (const { name } of services) {
    if (!positions.has(name)) positions.set(name, positions.size);
  }
}

/** The number of a service, from 1; 0 for one that is not known. */
export function serviceNumber(name) {
  return (positions.get(name) ?? -1) + 1;
}

/** The CSS class that sets --c to the colour of a service. */
export function serviceClass(name) {
  return positions.has(name) ? `s${positions.get(name) % COLOURS}` : "s-other";
}

/** A small square in the colour of a service, with its number. */
export function swatch(name) {
  const node = el("span", { "aria-hidden": "true" });
  showSwatch(node, name);
  return node;
}

export function showSwatch(node, name) {
  setAttribute(node, "class", `swatch ${serviceClass(name)}`);
  setText(node, serviceNumber(name) || "?");
}
