// The playground's settings: system prompt, sampling, structured output, tools. The browser's tab keeps them.

import { el, field } from "./dom.js";
import { SAMPLING } from "./generation_request.js";

const KEPT = "shoal-playground";
const SCHEMA = '{"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}';
const TOOLS = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]';

/** {node, read()}; read returns the settings for buildRequest. */
export function playgroundSettings() {
  const system = el("textarea", { rows: "2" });
  const inputs = Object.fromEntries(
    SAMPLING.map(({ name, min, max, step }) => [name, el("input", { type: "number", name, min, max, step, placeholder: "default" })]),
  );
  const stop = el("textarea", { rows: "2", name: "stop" });
  const schema = el("textarea.code", { rows: "4", name: "schema", spellcheck: "false", placeholder: SCHEMA });
  const tools = el("textarea.code", { rows: "4", name: "tools", spellcheck: "false", placeholder: TOOLS });
  const logprobs = el("input", { type: "checkbox", name: "logprobs" });
  const node = el(
    "div.settings",
    {},
    field("System prompt", system),
    el(
      "details",
      {},
      el("summary", {}, "Sampling"),
      el("div.sampling", {}, ...SAMPLING.map(({ name, label }) => field(label, inputs[name]))),
      field("Stop at (one text a line)", stop),
      el("p.dim", {}, "What is left empty is the service's default."),
    ),
    el("details", {}, el("summary", {}, "Structured output"), field("JSON schema of the answer", schema)),
    el("details", {}, el("summary", {}, "Tools"), field("Tools, as JSON", tools, "A call is shown, and its result can be sent.")),
    el("label.check", {}, logprobs, "Log-probabilities"),
  );
  const read = () => ({
    system: system.value,
    sampling: Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value])),
    stop: stop.value,
    schema: schema.value,
    tools: tools.value,
    logprobs: logprobs.checked,
  });
  restore({ system, stop, schema, tools, ...inputs }, logprobs);
  node.addEventListener("input", () => sessionStorage.setItem(KEPT, JSON.stringify(read())));
  return { node, read };
}

function restore(fields, logprobs) {
  const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
  const values = { ...kept, ...kept.sampling };
  for (const [name, input] of Object.entries(fields)) input.value = values[name] ?? "";
  logprobs.checked = kept.logprobs ?? false;
}
