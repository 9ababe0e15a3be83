// Tokens of an answer; the one that is pointed at or has the focus shows its log-probability and what else was likely.

import { el, setAttribute, setHidden, setText } from "./dom.js";

/** {node, update(tokens)}; tokens: those of a GenerationStream, which only grow. */
export function tokenView() {
  const line = el("div.tokens-line", { role: "group", "aria-label": "Tokens of the answer; arrow keys go from one to the next" });
  const body = el("tbody");
  const title = el("caption");
  const table = el(
    "table.alternatives",
    {},
    title,
    el("thead", {}, el("tr", {}, ...["Token", "Probability", "Log-probability"].map((label) => el("th", { scope: "col" }, label)))),
    body,
  );
  const hint = el("p.dim", {}, "Point at a token, or go to one with Tab and the arrow keys.");
  const info = el("div.token-info", {}, hint, table);
  setHidden(table, true);
  let known = [];

  function show(index) {
    const { token, logprob, alternatives } = known[index];
    setHidden(hint, true);
    setHidden(table, false);
    setText(title, `Token ${index + 1}: ${visible(token)}`);
    const others = alternatives.some(([other]) => other === token) ? alternatives : [[token, logprob], ...alternatives];
    body.replaceChildren(...others.map(([other, value]) => alternative(other, value, other === token)));
    for (const node of line.querySelectorAll(".chosen")) node.classList.remove("chosen");
    line.children[index].classList.add("chosen");
  }

  function update(tokens) {
    known = tokens;
    for (let index = line.children.length; index < tokens.length; index += 1) {
      const node = el("span.token", { tabindex: index ? "-1" : "0", "data-index": index }, tokens[index].token);
      node.style.setProperty("--doubt", `${Math.round(30 * (1 - Math.exp(tokens[index].logprob ?? 0)))}%`);
      line.append(node);
    }
  }

  const indexOf = (target) => (target.dataset?.index === undefined ? null : Number(target.dataset.index));
  line.addEventListener("mouseover", ({ target }) => indexOf(target) !== null && show(indexOf(target)));
  line.addEventListener("focusin", ({ target }) => indexOf(target) !== null && show(indexOf(target)));
  line.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    const next = line.children[indexOf(event.target) + step];
    if (!step || !next) return;
    event.preventDefault();
    setAttribute(event.target, "tabindex", "-1");
    setAttribute(next, "tabindex", "0");
    next.focus();
  });
  return { node: el("div", {}, line, info), update };
}

function alternative(token, logprob, chosen) {
  const probability = Math.exp(logprob ?? 0);
  const bar = el("span.fill");
  bar.style.setProperty("width", `${100 * probability}%`);
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, visible(token), chosen ? el("span.dim", {}, " (sampled)") : null),
    el("td", {}, el("span.bar", { "aria-hidden": "true" }, bar), `${(100 * probability).toFixed(1)}%`),
    el("td.number", {}, logprob === null ? "–" : logprob.toFixed(3)),
  );
}

/** A token in quotes, with line ends that can be seen. */
function visible(token) {
  return `“${token.replaceAll("\n", "↵")}”`;
}
