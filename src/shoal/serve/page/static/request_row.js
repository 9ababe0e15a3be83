// A request in the list: its row, and its details below when it is open.

import { el, setAttribute, setHidden, setText, sync } from "./dom.js";
import { clock, number, seconds } from "./format.js";
import { spans, stateOf } from "./phases.js";
import { showSwatch, swatch } from "./service_colours.js";
import { timeline } from "./timeline.js";

let rows = 0;

/** {node, update({request, now, range})}; node is a tbody. opened: a Set of ids that the row adds itself to. */
export function requestRow({ request }, opened) {
  rows += 1;
  const id = `request-${rows}`;
  const button = el("button.row-button", { type: "button", "aria-expanded": "false", "aria-controls": id });
  const mark = swatch(request.service);
  const engine = el("td.engine", { role: "cell" });
  const state = el("span.state");
  const marks = el("span.marks");
  const tokens = el("td.tokens.number", { role: "cell" });
  const line = timeline();
  const content = el("td", { role: "cell", colspan: "6" });
  const details = el("tr.details", { id, role: "row" }, content);
  const parts = detailParts();
  content.append(parts.node);
  const summary = el(
    "tr.summary",
    { role: "row" },
    el("th.request", { scope: "row", role: "rowheader" }, button),
    el("td.service", { role: "cell" }, el("span.service-name", {}, mark, el("span", {}, request.service))),
    engine,
    el("td.request-state", { role: "cell" }, state, marks),
    tokens,
    el("td.line", { role: "cell" }, line.node),
  );
  const node = el("tbody", { role: "rowgroup" }, summary, details);

  let latest = null;

  function showOpen() {
    const open = opened.has(request.id);
    setAttribute(button, "aria-expanded", String(open));
    setHidden(details, !open);
  }

  // The button is for the keyboard; a click anywhere in the row does the same, unless it ends a selection of text.
  summary.addEventListener("click", () => {
    if (!getSelection().isCollapsed) return;
    if (!opened.delete(request.id)) opened.add(request.id);
    update(latest);
  });

  function update(item) {
    latest = item;
    const { request: current, now, range } = item;
    const all = spans(current, now);
    setText(button, current.name || current.id);
    showSwatch(mark, current.service);
    setText(engine, current.engine ?? "–");
    setText(state, stateOf(current));
    setAttribute(state, "data-state", stateOf(current));
    setText(marks, marksOf(all));
    setText(tokens, `${number(current.prompt_tokens)} → ${number(current.output_tokens)}`);
    line.update(all, now, range);
    if (opened.has(current.id)) parts.update(current, all);
    showOpen();
  }

  return { node, update };
}

function marksOf(all) {
  const marks = [];
  const preempted = all.filter((span) => span.phase === "preempted").length;
  if (preempted) marks.push(`${preempted}× preempted`);
  if (all.some((span) => span.change === "moved")) marks.push("moved");
  if (all.some((span) => span.change === "resumed")) marks.push("resumed");
  return marks.join(", ");
}

function detailParts() {
  const facts = el("dl.facts");
  const body = el("tbody");
  const table = el(
    "table.phases",
    {},
    el("caption", {}, "Phases"),
    el("thead", {}, el("tr", {}, ...["Phase", "Engine", "Begin", "Length", ""].map((label) => el("th", { scope: "col" }, label)))),
    body,
  );
  return {
    node: el("div.request-details", {}, facts, table),
    update(request, all) {
      const first = all[0]?.begin ?? 0;
      const begun = all.find((span) => span.phase === "decode")?.begin;
      const rows = [
        ["Id", request.id],
        ["Name (x-request-id)", request.name || "–"],
        ["Prompt", `${number(request.prompt_tokens)} tokens, ${number(request.cached_tokens)} of them cached`],
        ["Output", `${number(request.output_tokens)} tokens`],
        ["Came", first ? clock(first) : "–"],
        ["First token after", begun === undefined ? "–" : seconds(begun - first)],
        [request.ended === null ? "Time so far" : "Time", all.length ? seconds(all.at(-1).end - first) : "–"],
        ["Finish", request.ended === null ? "not finished" : (request.finish ?? "–")],
        ...(request.why ? [["Why", request.why]] : []),
      ];
      sync(facts, rows, (row) => row[0], ([label]) => {
        const value = el("dd");
        return { node: el("div", {}, el("dt", {}, label), value), update: (row) => setText(value, row[1]) };
      });
      sync(body, all.map((span, index) => ({ ...span, index, first })), (span) => String(span.index), phaseRow);
    },
  };
}

function phaseRow(span) {
  const sample = el(`span.phase.sample.phase-${span.phase}`, { "aria-hidden": "true" });
  const length = el("td.number");
  const node = el(
    "tr",
    {},
    el("th", { scope: "row" }, sample, span.phase),
    el("td", {}, span.engine ?? "–"),
    el("td.number", {}, `+${seconds(span.begin - span.first)}`),
    length,
    el("td", {}, span.change === "moved" ? "moved here" : span.change === "resumed" ? "resumed after its engine ended" : ""),
  );
  return { node, update: (now) => setText(length, seconds(now.end - now.begin)) };
}
