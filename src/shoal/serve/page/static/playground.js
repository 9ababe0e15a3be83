import { el } from "./dom.js";
export function playgroundView() { return { node: el("div", {}, "soon"), show() {} }; }
