// A small line without axes; the number beside it says where it ends.

import { setAttribute, svg } from "./dom.js";

const WIDTH = 64;
const HEIGHT = 16;

/** {node, update(values)}; values: [[x from 0 to 1, y]], scaled from 0 to the greatest y. */
export function sparkline() {
  const line = svg("polyline", { points: "" });
  const node = svg("svg.sparkline", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true", preserveAspectRatio: "none" }, line);
  const update = (values) => {
    const most = Math.max(1e-9, ...values.map(([, y]) => y));
    const points = values.map(([x, y]) => `${(x * WIDTH).toFixed(1)},${(HEIGHT - 1 - (y / most) * (HEIGHT - 2)).toFixed(1)}`);
    setAttribute(line, "points", points.join(" "));
  };
  return { node, update };
}
