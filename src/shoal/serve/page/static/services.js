import { el } from "./dom.js";
export function servicesView() { return { node: el("div", {}, "soon"), show() {} }; }
