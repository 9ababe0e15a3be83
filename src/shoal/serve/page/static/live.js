// The tab Live: what needs attention, engines, services, the last events.

import { el, setHidden, setText, sync } from "./dom.js";
import { engineCard } from "./engine_card.js";
import { clock, number, share } from "./format.js";
import { serviceTable } from "./service_table.js";

export function liveView(history) {
  const totals = el("dl.totals", { "aria-label": "Totals" });
  const attention = el("ul.attention");
  const calm = el("p.calm");
  const engines = el("div.engines");
  const noEngines = el("p.dim", {}, "No engine runs yet.");
  const services = serviceTable(history);
  const events = el("ol.events", { reversed: true });
  const noEvents = el("p.dim", {}, "Nothing has happened yet.");
  const node = el(
    "div.live",
    {},
    el("section.panel.top", { "aria-labelledby": "attention-title" }, el("h2", { id: "attention-title" }, "Now"), totals, calm, attention),
    el("section", { "aria-labelledby": "services-title" }, el("h2", { id: "services-title" }, "Services"), services.node),
    el("section", { "aria-labelledby": "engines-title" }, el("h2", { id: "engines-title" }, "Engines"), noEngines, engines),
    el("section", { "aria-labelledby": "events-title" }, el("h2", { id: "events-title" }, "Last events"), noEvents, events),
  );

  function show(snapshot) {
    showTotals(totals, snapshot);
    const problems = findProblems(snapshot);
    setText(calm, snapshot.services.length ? "Nothing needs attention." : "There is nothing to show before the first service.");
    setHidden(calm, problems.length > 0);
    sync(attention, problems, (problem) => problem.what, problemItem);
    setHidden(noEngines, snapshot.engines.length > 0);
    sync(engines, snapshot.engines, (engine) => engine.name, (engine) => engineCard(engine.name));
    services.update(snapshot);
    setHidden(noEvents, snapshot.events.length > 0);
    sync(events, [...snapshot.events].reverse(), (event) => String(event.number), eventItem);
  }

  return { node, show };
}

/** What a person should look at first, as [{what, why, level}]. */
function findProblems(snapshot) {
  const problems = [];
  if (snapshot.status === "draining") {
    problems.push({ what: "This server", why: "ends: requests under way go on, new ones are refused.", level: "warning" });
  }
  for (const engine of snapshot.engines) {
    if (engine.state === "ready" || engine.state === "standby") continue;
    const last = engine.last_error ? ` The last time it ended: ${engine.last_error}.` : "";
    const words = { waiting: "ended and waits for its restart.", loading: "is loading.", draining: "takes no new requests." };
    problems.push({ what: `Engine ${engine.name}`, why: (words[engine.state] ?? engine.state) + last, level: engine.state === "waiting" ? "bad" : "warning" });
  }
  for (const service of snapshot.services) {
    if (service.state === "failed") {
      problems.push({ what: service.name, why: `failed: ${service.error ?? "no reason is known"}`, level: "bad" });
    } else if (service.note) {
      problems.push({ what: service.name, why: service.note, level: "warning" });
    }
  }
  return problems;
}

function problemItem() {
  const what = el("strong");
  const why = el("span");
  const node = el("li", {}, el("span.mark", { "aria-hidden": "true" }, "▲"), what, " ", why);
  return {
    node,
    update(problem) {
      node.dataset.level = problem.level;
      setText(what, problem.what);
      setText(why, problem.why);
    },
  };
}

function showTotals(list, snapshot) {
  const sum = (key) => snapshot.services.reduce((total, service) => total + service[key], 0);
  const missed = snapshot.services.reduce((total, service) => total + service.goals.missed, 0);
  const rows = [
    ["running", number(sum("running")), ""],
    ["waiting", number(sum("waiting")), ""],
    ["output tokens/s", number(sum("output_tokens_per_s")), ""],
    ["prompt tokens/s", number(sum("prompt_tokens_per_s")), ""],
    ["KV live + cached", poolShares(snapshot.engines), ""],
    ["preempted", number(sum("preemptions")), "last minute"],
    ["refused", number(sum("refused")), "last minute"],
    ["goals missed", number(missed), "last minute"],
    ["engines ready", `${snapshot.engines.filter((engine) => engine.state === "ready").length} of ${snapshot.engines.length}`, ""],
  ];
  sync(list, rows, (row) => row[0], ([label, , hint]) => {
    const value = el("dd");
    const node = el("div", {}, el("dt", {}, label, hint ? el("span.dim", {}, ` ${hint}`) : null), value);
    return { node, update: (row) => setText(value, row[1]) };
  });
}

/** Which shares of all pools together are live and cached. */
function poolShares(engines) {
  const pools = engines.map((engine) => engine.kv).filter(Boolean);
  const sum = (key) => pools.reduce((total, pool) => total + pool[key], 0);
  const total = sum("total_bytes");
  return total ? `${share(sum("live_bytes"), total)} + ${share(sum("cached_bytes"), total)}` : "–";
}

function eventItem(event) {
  const node = el(
    "li",
    { "data-level": event.level },
    el("time.dim", { datetime: new Date(event.time * 1000).toISOString() }, clock(event.time)),
    el("span.level", {}, event.level === "warning" ? "▲ warning" : event.level),
    el("span.text", {}, event.text),
  );
  return { node, update() {} };
}
