// A request as a command line, and as a Python program. The key is never in them: $SHOAL_API_KEY stands for it.

const EXTRA = ["top_k", "min_p", "repetition_penalty"]; // fields that the package openai does not know

/** base: address of the server, with a slash at its end. */
export function curlCommand(base, { path, body }) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl --no-buffer '${base.replaceAll("'", "%27")}${path}'`,
    `  -H "Authorization: Bearer $SHOAL_API_KEY"`,
    `  -H 'Content-Type: application/json'`,
    `  -d '${json}'\n`,
  ].join(" \\\n");
}

export function pythonProgram(base, { path, body }) {
  const chat = path.endsWith("chat/completions");
  const fields = Object.entries(body).filter(([name]) => !EXTRA.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => EXTRA.includes(name)));
  if (Object.keys(extra).length) fields.push(["extra_body", extra]);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(`${base}v1`)}, api_key=os.environ.get("SHOAL_API_KEY", "none"))`,
    `stream = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...fields.map(([name, value]) => `    ${name}=${literal(value, 4)},`),
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    `        print(chunk.choices[0].${chat ? "delta.content" : "text"} or "", end="", flush=True)`,
    "",
  ].join("\n");
}

/** A value of JSON as Python writes it. indent: of the line that it begins in. */
export function literal(value, indent = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string" || typeof value === "number") return JSON.stringify(value);
  const inner = " ".repeat(indent + 4);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((item) => literal(item, indent + 4))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, indent + 4)}`);
  if (!parts.length) return open + close;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${" ".repeat(indent)}${close}`;
}
