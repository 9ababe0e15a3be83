// A form that adds a service or an engine.

import { el, field, setText } from "./dom.js";

/**
 * fields: {name: {label, required, hint}}; more: an example of further settings, as JSON.
 * add(settings): sends them; resolves to whether that worked.
 */
export function addForm(title, fields, more, add) {
  const inputs = Object.fromEntries(
    Object.entries(fields).map(([name, { required }]) => [name, el("input", { name, required, autocomplete: "off", spellcheck: "false" })]),
  );
  const further = el("textarea.code", { name: "further", rows: "2", spellcheck: "false", placeholder: more });
  const problem = el("p.error", { role: "alert" });
  const submit = async (event) => {
    event.preventDefault();
    setText(problem, "");
    const settings = {};
    for (const [name, input] of Object.entries(inputs)) if (input.value.trim()) settings[name] = input.value.trim();
    try {
      Object.assign(settings, parseSettings(further.value));
    } catch (error) {
      setText(problem, error.message);
      return;
    }
    if (await add(settings)) event.target.reset();
  };
  const form = el(
    "form.add",
    { on: { submit } },
    ...Object.entries(fields).map(([name, { label, hint }]) => field(label, inputs[name], hint)),
    field("Further settings, as a JSON object", further, "As in the configuration."),
    problem,
    el("button.primary", { type: "submit" }, title),
  );
  return el("details", {}, el("summary", {}, title), form);
}

function parseSettings(text) {
  if (!text.trim()) return {};
  let settings;
  try {
    settings = JSON.parse(text);
  } catch (error) {
    throw new Error(`The further settings are not valid JSON: ${error.message}`);
  }
  if (settings === null || typeof settings !== "object" || Array.isArray(settings)) {
    throw new Error("The further settings must be a JSON object.");
  }
  return settings;
}
