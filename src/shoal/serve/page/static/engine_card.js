// An engine: its state, its weights, and its KV pool as a picture.

import { el, setAttribute, setHidden, setStyle, setText } from "./dom.js";
import { bytes, number, seconds, share } from "./format.js";
import { poolPicture } from "./pool.js";

/** {node, update(engine)}. */
export function engineCard(name) {
  const state = el("span.state");
  const device = el("span.dim");
  const facts = Object.fromEntries(
    ["requests", "steps/s", "moved away", "restarts", "heartbeat"].map((label) => [label, el("dd")]),
  );
  const error = el("p.error");
  const weightsText = el("span");
  const weightsFill = el("div.fill");
  const weightsBar = el("div.bar", { "aria-hidden": "true" }, weightsFill);
  const pool = poolPicture();
  const noPool = el("p.dim", {}, "No KV pool is known yet.");
  const node = el(
    "article.panel.engine",
    { "aria-label": `Engine ${name}` },
    el("header", {}, el("h3", {}, `Engine ${name}`), state, device),
    el("dl.facts", {}, ...Object.entries(facts).map(([label, value]) => el("div", {}, el("dt", {}, label), value))),
    error,
    el("div.weights", {}, el("p", {}, el("strong", {}, "Weights "), weightsText), weightsBar),
    noPool,
    pool.node,
  );

  function update(engine) {
    setText(state, engine.state === "waiting" ? "waiting for its restart" : engine.state);
    setAttribute(state, "data-state", engine.state);
    setText(device, engine.device);
    setText(facts.requests, number(engine.requests));
    setText(facts["steps/s"], number(engine.steps_per_s));
    setText(facts["moved away"], number(engine.moved));
    setText(facts.restarts, number(engine.restarts));
    setText(facts.heartbeat, engine.heartbeat_age_s === null ? "–" : `${seconds(engine.heartbeat_age_s)} ago`);
    setText(error, engine.last_error ? `Last error: ${engine.last_error}` : "");
    setHidden(error, !engine.last_error);
    showWeights(engine);
    setHidden(noPool, engine.kv !== null);
    setHidden(pool.node, engine.kv === null);
    if (engine.kv) pool.update(engine.kv);
  }

  function showWeights({ weight_bytes: used, weights_memory_bytes: limit }) {
    const known = limit !== null && used !== null;
    let text = used === null ? "not known yet" : bytes(used);
    if (known) text += ` of at most ${bytes(limit)} (${share(used, limit)})`;
    else if (used !== null) text += ", all stay in memory";
    setText(weightsText, text);
    setHidden(weightsBar, !known);
    if (known) setStyle(weightsFill, "width", `${Math.min(100, (100 * used) / limit)}%`);
  }

  return { node, update };
}
