// What a request's phases mean: how long each lasted, and where the request changed its engine.

export const PHASES = ["waiting", "prefill", "decode", "preempted"];
const EARLIER = "earlier"; // several phases of a request that had very many

/**
 * The phases with their ends: [{begin, end, phase, engine, change}], times in seconds.
 *
 * change: null, "moved" (from another engine, with its KV or without) or "resumed" (it had no engine for a while, since its own ended).
 */
export function spans(request, now) {
  let engine = null;
  let waited = false;
  return request.phases.map(([begin, phase, where], index) => {
    const end = request.phases[index + 1]?.[0] ?? request.ended ?? now;
    let change = null;
    if (phase === "waiting") {
      // A move without KV waits as well, but never without an engine.
      waited ||= engine !== null && where === null;
    } else if (where !== null) {
      if (waited) change = "resumed";
      else if (engine !== null && where !== engine) change = "moved";
      waited = false;
      engine = where;
    }
    return { begin, end: Math.max(begin, end), phase, engine: where, change };
  });
}

/** Whether a request is in a state of the filter, or was ever. */
export const STATES = {
  all: ["all", () => true],
  unfinished: ["unfinished", (request) => request.ended === null],
  waiting: ["waiting now", (request) => request.ended === null && last(request) === "waiting"],
  running: ["running now", (request) => request.ended === null && ["prefill", "decode"].includes(last(request))],
  preempted: ["preempted, now or before", (request) => request.phases.some(([, phase]) => phase === "preempted")],
  moved: ["moved to another engine", (request) => changed(request, "moved")],
  resumed: ["resumed after an engine ended", (request) => changed(request, "resumed")],
  ended: ["ended", (request) => request.ended !== null],
  failed: ["ended otherwise than well", (request) => request.ended !== null && !["stop", "length"].includes(request.finish)],
};

/** The present phase, or how the request ended. */
export function stateOf(request) {
  return request.ended === null ? last(request) : (request.finish ?? "ended");
}

/** Seconds by phase, in the order of PHASES; phases that never were are left out. */
export function sums(allSpans) {
  const totals = new Map();
  for (const span of allSpans) totals.set(span.phase, (totals.get(span.phase) ?? 0) + span.end - span.begin);
  return [...PHASES, EARLIER].filter((phase) => totals.has(phase)).map((phase) => [phase, totals.get(phase)]);
}

function last(request) {
  return request.phases.at(-1)?.[1] ?? "waiting";
}

function changed(request, change) {
  return spans(request, 0).some((span) => span.change === change);
}
