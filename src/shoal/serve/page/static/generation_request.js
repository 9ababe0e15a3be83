// The body of a request for an answer, from what the playground's fields say. No elements here.

export const SAMPLING = [
  { name: "temperature", label: "Temperature", step: "0.1", min: "0" },
  { name: "max_tokens", label: "Most output tokens", step: "1", min: "1" },
  { name: "top_p", label: "Top p", step: "0.05", min: "0", max: "1" },
  { name: "top_k", label: "Top k", step: "1", min: "-1" },
  { name: "min_p", label: "Min p", step: "0.01", min: "0", max: "1" },
  { name: "seed", label: "Seed", step: "1" },
  { name: "presence_penalty", label: "Presence penalty", step: "0.1", min: "-2", max: "2" },
  { name: "frequency_penalty", label: "Frequency penalty", step: "0.1", min: "-2", max: "2" },
  { name: "repetition_penalty", label: "Repetition penalty", step: "0.05", min: "0" },
];
const ALTERNATIVES = 5;

/**
 * {path, body} of a request.
 *
 * service: one of a snapshot. messages: of the conversation, without the system prompt. settings: {system, sampling: {name: text},
 * stop: lines of text, schema, tools: JSON text, logprobs: boolean}. Raises an Error in words for JSON that is none.
 * A model without a chat template continues the texts of the conversation.
 */
export function buildRequest(service, messages, settings) {
  const body = { model: service.name };
  if (service.chat) {
    const system = settings.system.trim();
    body.messages = system ? [{ role: "system", content: system }, ...messages] : [...messages];
  } else {
    body.prompt = messages.map((message) => message.content ?? "").join("");
  }
  for (const { name } of SAMPLING) {
    const text = (settings.sampling[name] ?? "").trim();
    if (text !== "") body[name] = Number(text);
  }
  const stops = settings.stop.split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops;
  const schema = parse(settings.schema, "The JSON schema");
  if (schema !== null) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = service.chat ? parse(settings.tools, "The list of tools") : null;
  if (tools !== null) body.tools = Array.isArray(tools) ? tools : [tools];
  if (settings.logprobs) Object.assign(body, service.chat ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES });
  Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  return { path: service.chat ? "v1/chat/completions" : "v1/completions", body };
}

function parse(text, what) {
  if (text.trim() === "") return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not valid JSON: ${error.message}`);
  }
}
