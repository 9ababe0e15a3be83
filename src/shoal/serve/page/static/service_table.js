// The table of services: how each does, and why it is slow.

import { el, setAttribute, setHidden, setText, sync } from "./dom.js";
import { number, seconds, share } from "./format.js";
import { swatch, showSwatch } from "./service_colours.js";
import { sparkline } from "./sparkline.js";

const COLUMNS = [
  ["Service", ""],
  ["State", ""],
  ["Why it is slow", ""],
  ["Running", "requests in steps now", "number"],
  ["Waiting", "requests not yet in steps, with the last two minutes", "number"],
  ["Swapped", "requests whose KV is outside of the pool", "number"],
  ["Output tokens/s", "over the last 10 s, with the last two minutes", "number"],
  ["Prompt tokens/s", "over the last 10 s", "number"],
  ["Requests/s", "over the last 10 s", "number"],
  ["TTFT p50 / p95", "time to the first token, over the last minute", "number"],
  ["Inter-token p50 / p95", "time between tokens, over the last minute", "number"],
  ["Preempted", "in the last minute", "number"],
  ["Refused", "in the last minute", "number"],
  ["Goals met", "of requests with latency goals that ended in the last minute", "number"],
  ["Weights", "by engine"],
];

/** {node, update(snapshot)}. */
export function serviceTable(history) {
  const body = el("tbody");
  const empty = el("p.dim", {}, "There is no service yet.");
  const table = el(
    "table.services",
    {},
    el("caption.hidden-text", {}, "Services, with their load and latency"),
    el("thead", {}, el("tr", {}, ...COLUMNS.map(([label, hint, kind]) => el(kind ? `th.${kind}` : "th", { scope: "col", title: hint }, label)))),
    body,
  );
  const scroller = el("div.scroller", { tabindex: "0", role: "region", "aria-label": "Table of services" }, table);
  return {
    node: el("div", {}, empty, scroller),
    update(snapshot) {
      setHidden(empty, snapshot.services.length > 0);
      setHidden(scroller, snapshot.services.length === 0);
      sync(body, snapshot.services, (service) => service.name, (service) => row(service.name, history));
    },
  };
}

function row(name, history) {
  const mark = swatch(name);
  const model = el("span.dim.model");
  const state = el("span.state");
  const note = el("span.note");
  const lines = { tokens: sparkline(), waiting: sparkline() };
  const cells = Object.fromEntries(["running", "waiting", "swapped", "output", "prompt", "requests", "ttft", "between", "refused", "goals"].map((key) => [key, el("span")]));
  const preempted = el("a", { href: link(name, "preempted") });
  const weights = el("span.places");
  const numeric = (...children) => el("td.number", {}, ...children);
  const node = el(
    "tr",
    {},
    el("th", { scope: "row" }, el("div.service-name", {}, mark, el("a", { href: link(name) }, name), model)),
    el("td", {}, state),
    el("td.why", {}, note),
    numeric(cells.running),
    numeric(lines.waiting.node, cells.waiting),
    numeric(cells.swapped),
    numeric(lines.tokens.node, cells.output),
    numeric(cells.prompt),
    numeric(cells.requests),
    numeric(cells.ttft),
    numeric(cells.between),
    numeric(preempted),
    numeric(cells.refused),
    numeric(cells.goals),
    el("td", {}, weights),
  );

  function update(service) {
    showSwatch(mark, name);
    setText(model, service.model === name ? "" : service.model);
    setText(state, service.state);
    setAttribute(state, "data-state", service.state);
    const why = service.state === "failed" ? service.error ?? "" : service.note;
    setText(note, why ? `▲ ${why}` : "");
    setText(cells.running, number(service.running));
    setText(cells.waiting, number(service.waiting));
    setText(cells.swapped, number(service.swapped));
    setText(cells.output, number(service.output_tokens_per_s));
    setText(cells.prompt, number(service.prompt_tokens_per_s));
    setText(cells.requests, number(service.requests_per_s));
    showLatency(cells.ttft, service.ttft_s);
    showLatency(cells.between, service.inter_token_s);
    setText(preempted, number(service.preemptions));
    setText(cells.refused, number(service.refused));
    showGoals(cells.goals, service.goals);
    showPlaces(weights, service.engines);
    lines.tokens.update(history.values(name, "tokens"));
    lines.waiting.update(history.values(name, "waiting"));
    for (const [cell, value] of [[cells.waiting, service.waiting], [preempted, service.preemptions], [cells.refused, service.refused], [cells.swapped, service.swapped]]) {
      cell.classList.toggle("marked", value > 0);
      cell.classList.toggle("zero", value === 0);
    }
  }

  return { node, update };
}

function link(service, state = "") {
  const parameters = new URLSearchParams({ service });
  if (state) parameters.set("state", state);
  return `#requests?${parameters}`;
}

function showLatency(cell, { count, p50, p95, p99 }) {
  setText(cell, count ? `${seconds(p50)} / ${seconds(p95)}` : "–");
  setAttribute(cell, "title", count ? `p99 ${seconds(p99)}, of ${number(count)}` : "nothing in the last minute");
}

function showGoals(cell, { met, missed }) {
  const all = met + missed;
  setText(cell, all ? `${share(met, all)} of ${number(all)}` : "–");
  cell.classList.toggle("marked", missed > 0);
}

function showPlaces(node, engines) {
  const places = Object.entries(engines).map(([name, { weights }]) => ({ name, weights }));
  sync(node, places, (place) => place.name, ({ name }) => {
    const item = el("span.place");
    return {
      node: item,
      update({ weights }) {
        setText(item, `${name}: ${weights}`);
        setAttribute(item, "data-place", weights);
      },
    };
  });
}
