// Operators' changes: sends them, and follows those that run.

import { el, setAttribute, setHidden, setText, sync } from "./dom.js";
import { bytes, clock, number } from "./format.js";
import { ask, keyForm } from "./keys.js";

const POLL_MS = 1000;
const ENDED_SHOWN = 10;

/** {node, change(method, path, body), refresh()}; change resolves to whether the server began the change. */
export function operations() {
  const outcome = el("div.outcome", { role: "status" });
  const body = el("tbody");
  const none = el("p.dim", { hidden: true }, "No operation is known.");  // until the server said so
  const table = el(
    "table.operations",
    {},
    el("caption.hidden-text", {}, "Operations, the last ones first"),
    el("thead", {}, el("tr", {}, ...["Operation", "State", "Progress", "Begun"].map((label) => el("th", { scope: "col" }, label)))),
    body,
  );
  const scroller = el("div.scroller", { tabindex: "0", role: "region", "aria-label": "Table of operations", hidden: true }, table);
  let timer = null;

  async function change(method, path, settings) {
    const what = `${method === "DELETE" ? "remove" : path.split("/").at(-1)}`;
    try {
      const options = { method };
      if (settings !== undefined) options.body = JSON.stringify(settings);
      const operation = await (await ask("admin", `admin/${path}`, options)).json();
      outcome.replaceChildren(el("p", {}, `Begun: ${describe(operation)}.`));
    } catch (error) {
      showError(error, `${what}: ${error.message}`, () => change(method, path, settings));
      return false;
    }
    await refresh();
    return true;
  }

  async function refresh() {
    clearTimeout(timer);
    let list;
    try {
      list = (await (await ask("admin", "admin/operations")).json()).data;
    } catch (error) {
      showError(error, error.message, refresh);
      return;
    }
    const running = list.filter((operation) => operation.state === "running");
    const ended = list.filter((operation) => operation.state !== "running").slice(-ENDED_SHOWN);
    const shown = [...running, ...ended].sort((one, two) => two.started - one.started);
    sync(body, shown, (operation) => operation.id, row);
    setHidden(scroller, shown.length === 0);
    setHidden(none, shown.length > 0);
    if (running.length) timer = setTimeout(refresh, POLL_MS);
  }

  function showError(error, words, again) {
    const retry = () => {
      outcome.replaceChildren();
      again();
    };
    outcome.replaceChildren(error.needsKey ? keyForm("admin", words, retry) : el("p.error", {}, words));
  }

  return { node: el("div", {}, outcome, none, scroller), change, refresh };
}

function describe(operation) {
  return `${operation.kind.replaceAll("_", " ")} ${operation.target}`;
}

function row(first) {
  const state = el("span.state");
  const bar = el("progress", { max: "100", "aria-label": `Progress of: ${describe(first)}` });
  const progress = el("span");
  const node = el(
    "tr",
    {},
    el("th.text", { scope: "row" }, describe(first)),
    el("td", {}, state),
    el("td.text", {}, bar, " ", progress),
    el("td", {}, clock(first.started)),
  );
  return {
    node,
    update(operation) {
      const { total, done } = operation;
      const running = operation.state === "running";
      setText(state, operation.state);
      setAttribute(state, "data-state", operation.state);
      setHidden(bar, !running);
      setAttribute(bar, "value", total ? (100 * done) / total : null);
      setText(progress, operation.error ?? (running ? `${operation.progress}${amounts(done, total)}` : ""));
    },
  };
}

/** Bytes of a download, or units of work, which are few. */
function amounts(done, total) {
  if (!total) return "";
  return total >= 2 ** 20 ? `: ${bytes(done)} of ${bytes(total)}` : `: ${number(done)} of ${number(total)}`;
}
