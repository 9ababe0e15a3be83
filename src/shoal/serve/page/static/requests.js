// The tab Requests: what each request did in the last seconds.

import { el, field, setHidden, setText, sync } from "./dom.js";
import { plural, seconds } from "./format.js";
import { PHASES, STATES } from "./phases.js";
import { requestRow } from "./request_row.js";

const RANGES_S = { 10: "10 s", 60: "1 min", 300: "5 min" };
const COLUMNS = ["Request", "Service", "Engine", "State", "Tokens"];

export function requestsView() {
  const opened = new Set();
  let latest = null;
  let range = 60;
  const again = () => latest && show(latest);
  const filter = () => {
    writeAddress();
    again();
  };
  const service = el("select", { on: { change: filter } });
  const state = el("select", { on: { change: filter } }, ...Object.entries(STATES).map(([value, [label]]) => el("option", { value }, label)));
  const search = el("input", { type: "search", placeholder: "id or name", spellcheck: "false", on: { input: filter } });
  const count = el("p.count.dim");
  const empty = el("p.empty");
  const axis = el("div.axis", { "aria-hidden": "true" });
  const table = el(
    "table.requests",
    { role: "table" },
    el("caption.hidden-text", {}, "Requests, unfinished ones first, with the phases of each"),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...COLUMNS.map((label) => el("th", { scope: "col", role: "columnheader" }, label)), el("th.line", { scope: "col", role: "columnheader" }, el("span.hidden-text", {}, "Phases"), axis))),
  );
  const node = el(
    "div",
    {},
    el("h2.hidden-text", {}, "Requests"),
    el(
      "form.filters",
      { "aria-label": "Filter", on: { submit: (event) => event.preventDefault() } },
      field("Service", service),
      field("State", state),
      field("Find", search),
      ranges((chosen) => {
        range = chosen;
        again();
      }),
      count,
    ),
    phaseKey(),
    empty,
    table,
  );
  table.addEventListener("keydown", (event) => moveAmongRows(event, table));

  /** Parameters of the address choose the filters; without any, those of before stay. */
  function open(parameters) {
    if (parameters.size) {
      wanted = parameters.get("service") ?? "";
      state.value = parameters.get("state") in STATES ? parameters.get("state") : "all";
      search.value = parameters.get("find") ?? "";
      if (latest) showServices(service, latest);
      takeWanted();
    }
    if (wanted === null) writeAddress();
  }

  /** The address says what is shown, for bookmarks and reloads. */
  function writeAddress() {
    const parameters = new URLSearchParams();
    if (service.value) parameters.set("service", service.value);
    if (state.value !== "all") parameters.set("state", state.value);
    if (search.value) parameters.set("find", search.value);
    history.replaceState(null, "", parameters.size ? `#requests?${parameters}` : "#requests");
  }

  // The service of a link may be known only after the first snapshot.
  let wanted = null;
  function takeWanted() {
    if (wanted === null || (wanted && ![...service.options].some((option) => option.value === wanted))) return;
    service.value = wanted;
    wanted = null;
  }

  function show(snapshot) {
    latest = snapshot;
    showServices(service, snapshot);
    takeWanted();
    const matches = STATES[state.value]?.[1] ?? (() => true);
    const text = search.value.trim().toLowerCase();
    const found = snapshot.requests.filter(
      (request) =>
        (!service.value || request.service === service.value) &&
        matches(request) &&
        (!text || `${request.id} ${request.name ?? ""}`.toLowerCase().includes(text)),
    );
    const items = found.map((request) => ({ request, now: snapshot.time, range }));
    sync(table, [null, ...items], (item) => item?.request.id ?? "head", (item) => (item ? requestRow(item, opened) : head));
    showAxis(axis, range);
    const left = snapshot.requests_left_out ? `; ${plural(snapshot.requests_left_out, "more request")} not listed` : "";
    setText(count, `${found.length} of ${plural(snapshot.requests.length, "request")}${left}`);
    setHidden(table, found.length === 0);
    setHidden(empty, found.length > 0);
    setText(empty, snapshot.requests.length ? "No request matches the filter." : "No request has come yet. The playground sends some.");
  }

  const head = { node: table.tHead, update() {} };
  return { node, show, open };
}

function showServices(select, { services }) {
  const names = [{ name: "", label: "all services" }, ...services.map(({ name }) => ({ name, label: name }))];
  sync(select, names, ({ name }) => name, ({ name, label }) => ({ node: el("option", { value: name }, label), update() {} }));
}

function ranges(choose) {
  const inputs = Object.entries(RANGES_S).map(([value, label]) =>
    el("label", {}, el("input", { type: "radio", name: "range", value, checked: value === "60", on: { change: () => choose(Number(value)) } }), label),
  );
  return el("fieldset.ranges", {}, el("legend", {}, "Last"), ...inputs);
}

function phaseKey() {
  const items = PHASES.map((phase) => el("li", {}, el(`span.phase.sample.phase-${phase}`, { "aria-hidden": "true" }), phase));
  return el("ul.phase-key", { "aria-label": "Phases" }, ...items, el("li", {}, el("span.change-sample", { "aria-hidden": "true" }, "▸1"), "goes on at engine 1"));
}

function showAxis(axis, range) {
  const marks = [1, 0.75, 0.5, 0.25, 0].map((part) => (part ? `−${seconds(part * range).replace(/\.0+ s| 0 s|\.50 s/, (end) => (end === ".50 s" ? ".5 s" : end === " 0 s" ? "" : " s"))}` : "now"));
  sync(axis, marks.map((text, index) => ({ text, index })), ({ index }) => String(index), () => {
    const node = el("span");
    return { node, update: ({ text }) => setText(node, text) };
  });
}

/** Arrow keys go from one request to the next; Escape closes the one that has the focus. */
function moveAmongRows(event, table) {
  const buttons = [...table.querySelectorAll(".row-button")];
  const at = buttons.indexOf(document.activeElement);
  if (at < 0) return;
  if (event.key === "Escape" && document.activeElement.getAttribute("aria-expanded") === "true") {
    document.activeElement.click();
    return;
  }
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  buttons[at + step]?.focus();
}
