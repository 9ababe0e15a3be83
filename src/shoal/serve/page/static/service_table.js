// The table of services: how each does, and why it is slow.

import { el, setAttribute, setHidden, setText, sync } from "./dom.js";
import { number, range, seconds, share } from "./format.js";
import { swatch, showSwatch } from "./service_colours.js";
import { sparkline } from "./sparkline.js";

const COLUMNS = [
  ["Service", ""],
  ["State", ""],
  ["Why it is slow", ""],
  ["Running", "requests in steps now", "number"],
  ["Waiting", "requests without a place in the pool: new ones, and preempted ones; with the last two minutes", "number"],
  ["Swapped", "of those: requests whose KV is saved on the host", "number"],
  ["Output\ntokens/s", "over the last 10 s, with the last two minutes", "number"],
  ["Prompt\ntokens/s", "over the last 10 s", "number.spare"],
  ["Requests/s", "over the last 10 s", "number.spare"],
  ["TTFT\np50 / p95", "time to the first token, over the last minute", "number.latency"],
  ["Inter-token\np50 / p95", "time between tokens, over the last minute", "number.latency"],
  ["Preempted", "how often, in the last minute", "number"],
  ["Refused", "with 429 or 503, in the last minute; invalid requests do not count", "number"],
  ["Goals\nmet", "of requests with latency goals that ended in the last minute", "number.wide"],
  ["Weights", "by engine", "weights"],
];

/** {node, update(snapshot)}. */
export function serviceTable(history) {
  const body = el("tbody", { role: "rowgroup" });
  const scroller = el("div.scroller", { tabindex: "0", role: "region", "aria-label": "Table of services" });
  const empty = el("p.dim", {}, "There is no service yet.");
  const table = el(
    "table.services",
    { role: "table" },
    el("caption.hidden-text", {}, "Services, with their load and latency"),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...COLUMNS.map(columnHead))),
    body,
  );
  scroller.append(table);
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
  const title = el("a", { href: link(name) }, name);
  const state = el("span.state");
  const note = el("span.note");
  const lines = { tokens: sparkline(), waiting: sparkline() };
  const cells = Object.fromEntries(["running", "waiting", "swapped", "output", "prompt", "requests", "ttft", "between", "refused", "goals"].map((key) => [key, el("span")]));
  const preempted = el("a", { href: link(name, "preempted") });
  const weights = el("span.places");
  const contents = [
    [note],
    [cells.running],
    [lines.waiting.node, cells.waiting],
    [cells.swapped],
    [lines.tokens.node, cells.output],
    [cells.prompt],
    [cells.requests],
    [cells.ttft],
    [cells.between],
    [preempted],
    [cells.refused],
    [cells.goals],
    [weights],
  ];
  const node = el(
    "tr",
    { role: "row" },
    el("th", { scope: "row", role: "rowheader" }, el("div.service-name", {}, mark, title)),
    el("td.now", { role: "cell" }, state),
    ...contents.map((content, index) => cell(COLUMNS[index + 2], content)),
  );

  function update(service) {
    showSwatch(mark, name);
    setAttribute(title, "title", `${name}: ${service.model}`);
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
    showPlaces(weights, service);
    lines.tokens.update(history.values(name, "tokens"));
    lines.waiting.update(history.values(name, "waiting"));
    for (const [cell, value] of [[cells.waiting, service.waiting], [preempted, service.preemptions], [cells.refused, service.refused], [cells.swapped, service.swapped]]) {
      cell.classList.toggle("marked", value > 0);
      cell.classList.toggle("zero", value === 0);
    }
  }

  return { node, update };
}

function columnHead([label, hint, kind]) {
  return el(kind ? `th.${kind}` : "th", { scope: "col", role: "columnheader", title: hint }, label);
}

/** data-label: narrow windows show it, since they have no heads of columns. */
function cell([label, hint, kind], content) {
  return el(`td.${kind || "why"}`, { role: "cell", title: hint, "data-label": label.replace("\n", " ") }, ...content);
}

function link(service, state = "") {
  const parameters = new URLSearchParams({ service });
  if (state) parameters.set("state", state);
  return `#requests?${parameters}`;
}

function showLatency(cell, { count, p50, p95, p99 }) {
  setText(cell, count ? range(p50, p95) : "–");
  setAttribute(cell, "title", count ? `p99 ${seconds(p99)}, of ${number(count)}` : "nothing in the last minute");
}

function showGoals(cell, { met, missed }) {
  const all = met + missed;
  setText(cell, all ? `${share(met, all)} of ${number(all)}` : "–");
  cell.classList.toggle("marked", missed > 0);
}

/** "resident", or, where engines differ, "resident: 0, 1" and "coming: 2"; then whether they are pinned. */
function showPlaces(node, { engines, pinned }) {
  const byPlace = new Map();
  for (const [name, { weights }] of Object.entries(engines)) byPlace.set(weights, [...(byPlace.get(weights) ?? []), name]);
  const places = [...byPlace].map(([place, names]) => [place, byPlaceText(place, names, engines)]);
  if (pinned) places.push(["pinned", "pinned"]);
  sync(node, places, ([place]) => place, ([place]) => {
    const item = el("span.place", { "data-place": place });
    return { node: item, update: ([, text]) => setText(item, text) };
  });
}

function byPlaceText(place, names, engines) {
  return names.length === Object.keys(engines).length ? place : `${place}: ${names.join(", ")}`;
}
