// The tab Playground: a conversation with a service, or with two side by side.

import { answer } from "./answer.js";
import { el, field, setAttribute, setHidden, setText, sync } from "./dom.js";
import { buildRequest } from "./generation_request.js";
import { playgroundSettings } from "./playground_settings.js";

export function playgroundView() {
  const columns = [
    { select: el("select"), messages: [] },
    { select: el("select"), messages: [] },
  ];
  const settings = playgroundSettings();
  const input = el("textarea", { rows: "3", id: "message", placeholder: "Enter sends, Shift+Enter begins a new line" });
  const send = el("button.primary", { type: "submit" }, "Send");
  const stop = el("button", { type: "button", disabled: true }, "Stop");
  const clear = el("button", { type: "button" }, "Clear");
  const problem = el("p.error", { role: "alert" });
  const said = el("p.hidden-text", { role: "status" });
  const hint = el("p.dim");
  const log = el("div.log");
  const empty = el("p.empty", {}, "Write a message to begin.");
  let services = [];
  let running = 0;
  let abort = new AbortController();

  const composer = el(
    "form.composer",
    { on: { submit: (event) => { event.preventDefault(); sendMessage(); } } },
    el("label.label.dim", { for: "message" }, "Message"),
    input,
    el("div.row", {}, send, stop, clear),
    hint,
    problem,
  );
  const node = el(
    "div.playground",
    {},
    el("h2.hidden-text", {}, "Playground"),
    el("div.side", {}, field("Service", columns[0].select), field("Beside it", columns[1].select), settings.node),
    el("div.talk", {}, empty, log, said, composer),
  );

  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      sendMessage();
    }
  });
  node.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) abort.abort();
  });
  stop.addEventListener("click", () => abort.abort());
  clear.addEventListener("click", () => {
    abort.abort();
    for (const column of columns) column.messages = [];
    log.replaceChildren();
    setHidden(empty, false);
    setText(problem, "");
    input.focus();
  });
  for (const { select } of columns) select.addEventListener("change", showHint);
  columns[1].select.addEventListener("change", () => {
    // The second service takes the conversation up as the first has it.
    if (columns[1].select.value && !columns[1].messages.length) columns[1].messages = [...columns[0].messages];
  });

  const serviceOf = (column) => services.find(({ name }) => name === column.select.value) ?? null;

  function sendMessage() {
    const text = input.value;
    if (!text.trim() || running) return;
    const talking = columns.filter(serviceOf);
    if (start(talking, talking.map(() => [{ role: "user", content: text }]), el("p.message", {}, text))) input.value = "";
  }

  /** Send messages, one list for each of `talking`; returns false if the settings are wrong, which is shown. */
  function start(talking, added, heading) {
    setText(problem, talking.length ? "" : "There is no service to ask.");
    let requests;
    try {
      const chosen = settings.read();
      requests = talking.map((column, index) => buildRequest(serviceOf(column), [...column.messages, ...added[index]], chosen));
    } catch (error) {
      setText(problem, error.message);
      return false;
    }
    if (!requests.length) return false;
    if (!running) abort = new AbortController();
    const answers = el("div.answers");
    log.append(el("div.turn", {}, heading, answers));
    setHidden(empty, true);
    for (const [index, request] of requests.entries()) {
      run(talking[index], added[index], request, answers);
    }
    input.scrollIntoView({ block: "nearest" });
    return true;
  }

  async function run(column, added, request, place) {
    const messages = column.messages;
    const results = (sent) => start([column], [sent], el("p.message", {}, "Results of tools were sent."));
    const shown = answer(request, results);
    place.append(shown.node);
    showRunning(1);
    const stream = await shown.run(abort.signal);
    showRunning(-1);
    // After an error the message counts as not sent; after "Clear" the conversation is another one.
    if (stream) messages.push(...added, stream.message);
    else if (!input.value && added[0]?.role === "user") input.value = added[0].content;
    const ended = stream && !stream.finish ? "stopped" : "complete";
    setText(said, stream ? `The answer of ${request.body.model} is ${ended}.` : "");
  }

  function showRunning(change) {
    running += change;
    setAttribute(send, "disabled", running > 0);
    setAttribute(stop, "disabled", running === 0);
  }

  function showHint() {
    const base = columns.map(serviceOf).filter((service) => service && !service.chat);
    setText(hint, base.map(({ name }) => `${name} has no chat template: it continues the text, without the system prompt and tools.`).join(" "));
  }

  function show(snapshot) {
    services = snapshot.services;
    for (const [index, { select }] of columns.entries()) {
      const before = select.value;
      const none = index ? [{ name: "", state: "ready", none: true }] : [];
      sync(select, [...none, ...services], ({ name }) => name, ({ name }) => option(name));
      if (!before && !index) select.value = (services.find((one) => one.chat && one.state === "ready") ?? services[0])?.name ?? "";
    }
    showHint();
  }

  return { node, show };
}

function option(name) {
  const node = el("option", { value: name });
  return {
    node,
    update: (service) => setText(node, service.none ? "none" : service.state === "ready" ? name : `${name} (${service.state})`),
  };
}
