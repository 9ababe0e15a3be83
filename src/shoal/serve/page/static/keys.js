// Keys, kept in this tab of the browser alone, and requests that carry them.

import { el, field } from "./dom.js";

const AREAS = ["live", "api", "admin"];
const LABELS = { live: "API key or admin key", api: "API key", admin: "Admin key" };
const watchers = new Set();

/** The key for an area: its own, else one that was given for another. */
function keyFor(area) {
  return [area, ...AREAS].map((name) => sessionStorage.getItem(`shoal-key-${name}`)).find(Boolean) ?? null;
}

export function hasKeys() {
  return AREAS.some((area) => sessionStorage.getItem(`shoal-key-${area}`));
}

export function setKey(area, key) {
  sessionStorage.setItem(`shoal-key-${area}`, key);
  for (const watcher of watchers) watcher();
}

export function forgetKeys() {
  for (const area of AREAS) sessionStorage.removeItem(`shoal-key-${area}`);
  for (const watcher of watchers) watcher();
}

/** Call `watcher` whenever keys change. */
export function watchKeys(watcher) {
  watchers.add(watcher);
}

/** An error that the server reported. status: of HTTP. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

/**
 * Send a request with the key of `area`; raises Refused unless the answer is fine.
 *
 * Paths are relative to the page, so that it also works behind a prefix.
 */
export async function ask(area, path, options = {}) {
  const headers = { ...options.headers };
  const key = keyFor(area);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (options.body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  throw new Refused(response.status, messageOf(await response.text(), response.status));
}

function messageOf(body, status) {
  try {
    const { error } = JSON.parse(body);
    return error.message ?? String(error);
  } catch {
    return `the server answered with status ${status}`;
  }
}

/** A form that asks for the key of `area`. message: why. done: called when a key was given. */
export function keyForm(area, message, done) {
  const input = el("input", { type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  const submit = (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (!key) return;
    setKey(area, key);
    done();
  };
  return el(
    "form.key-form.panel",
    { on: { submit } },
    el("p", { role: "alert" }, message.charAt(0).toUpperCase() + message.slice(1)),
    field(LABELS[area], input, "Kept in this tab until it is closed."),
    el("button.primary", { type: "submit" }, "Use this key"),
  );
}
