// One answer of the playground: sends its request, and shows what comes.

import { copyButton } from "./copy_button.js";
import { el, field, setHidden, setText } from "./dom.js";
import { eventData } from "./events.js";
import { number, seconds } from "./format.js";
import { GenerationStream } from "./generation_stream.js";
import { ask, keyForm } from "./keys.js";
import { swatch } from "./service_colours.js";
import { curlCommand, pythonProgram } from "./snippets.js";
import { tokenView } from "./token_view.js";

/**
 * {node, run(signal)}; run resolves to a GenerationStream, or null after an error, which is shown.
 *
 * request: {path, body}. results(messages): sends the results of tool calls.
 */
export function answer(request, results) {
  const state = el("span.dim.answer-state", {}, "waiting for the first token");
  const id = crypto.randomUUID?.() ?? `page-${Math.random().toString(36).slice(2)}`;
  const life = el("a", { href: `#requests?find=${id}` }, "Its life");
  const reasoning = el("div.text");
  const reasoningBox = el("details.reasoning", { hidden: true }, el("summary", {}, "Reasoning"), reasoning);
  const text = el("div.text");
  const tokens = request.body.logprobs === undefined ? null : tokenView();
  const calls = el("div.calls");
  const error = el("div.answer-error");
  const figures = el("p.dim.figures");
  const shown = el("div");
  const base = new URL(".", document.baseURI).href;
  const copies = el(
    "div.row",
    {},
    copyButton("Copy as curl", () => curlCommand(base, request), shown),
    copyButton("Copy as Python", () => pythonProgram(base, request), shown),
    life,
  );
  const name = request.body.model;
  const node = el(
    "article.answer.panel",
    { "aria-label": `Answer of ${name}` },
    el("header.service-name", {}, swatch(name), el("strong", {}, name), state),
    reasoningBox,
    tokens ? tokens.node : text,
    calls,
    error,
    figures,
    copies,
    shown,
  );

  async function run(signal) {
    const stream = new GenerationStream();
    const begin = performance.now();
    let first = null;
    const waiting = setInterval(() => {
      if (first === null) setText(state, `waiting for the first token for ${Math.round((performance.now() - begin) / 1000)} s`);
    }, 1000);
    const show = () => {
      setText(reasoning, stream.reasoning);
      setHidden(reasoningBox, !stream.reasoning);
      if (tokens) tokens.update(stream.tokens);
      else setText(text, stream.text);
      setText(figures, figuresOf(stream, begin, first));
    };
    try {
      const response = await ask("api", request.path, {
        method: "POST",
        body: JSON.stringify(request.body),
        headers: { "X-Request-Id": id },
        signal,
      });
      for await (const data of eventData(response)) {
        if (data === "[DONE]") break;
        if (stream.take(JSON.parse(data))) first ??= performance.now();
        if (first !== null) setText(state, "answering");
        show();
      }
      setText(state, FINISHES[stream.finish] ?? stream.finish ?? "ended");
    } catch (problem) {
      if (signal.aborted) {
        setText(state, "stopped");
      } else {
        setText(state, "failed");
        showError(problem);
        return null;
      }
    } finally {
      clearInterval(waiting);
    }
    showCalls(stream);
    return stream;
  }

  function showError(problem) {
    // Of what went wrong on the way, browsers tell only "Failed to fetch", each in its own words.
    const words = problem instanceof TypeError ? "The server cannot be reached." : problem.message || String(problem);
    error.replaceChildren(problem.needsKey
      ? keyForm("api", words, () => error.replaceChildren(el("p", {}, "Send it again with this key.")))
      : el("p.error", { role: "alert" }, words));
  }

  function showCalls(stream) {
    if (!stream.toolCalls.length) return;
    const areas = stream.toolCalls.map((call) => {
      const area = el("textarea", { rows: "2" });
      return { call, area };
    });
    const submit = (event) => {
      event.preventDefault();
      setHidden(send, true);
      results(areas.map(({ call, area }) => ({ role: "tool", tool_call_id: call.id, content: area.value })));
    };
    const send = el("button", { type: "submit" }, "Send results");
    calls.replaceChildren(el(
      "form",
      { on: { submit } },
      ...areas.map(({ call, area }) => el(
        "div.call",
        {},
        el("p", {}, "Calls ", el("code", {}, `${call.function.name}(${call.function.arguments})`)),
        field(`Result of ${call.function.name}`, area),
      )),
      send,
    ));
  }

  return { node, run };
}

const FINISHES = { stop: "finished", length: "ended at its most tokens", tool_calls: "calls tools", content_filter: "filtered" };

function figuresOf(stream, begin, first) {
  if (first === null) return "";
  const parts = [`TTFT ${seconds((first - begin) / 1000)}`];
  const count = stream.usage?.completion_tokens;
  if (count !== undefined) {
    const span = (performance.now() - first) / 1000;
    if (count > 1 && span > 0) parts.push(`${number((count - 1) / span)} tokens/s`);
    const cached = stream.usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${number(stream.usage.prompt_tokens)} prompt tokens${cached ? ` (${number(cached)} cached)` : ""}`, `${number(count)} output tokens`);
  }
  return parts.join(" · ");
}
