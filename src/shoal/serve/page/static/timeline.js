// A request's phases as bars over the last seconds.

import { el, hiddenText, setAttribute, setHidden, setStyle, setText, sync } from "./dom.js";
import { seconds } from "./format.js";
import { sums } from "./phases.js";

/** {node, update(spans, now, range_s)}: bars of what lies between now - range_s and now. */
export function timeline() {
  const bars = el("div.bars", { "aria-hidden": "true" });
  const before = el("span.before.dim", { "aria-hidden": "true" });
  const words = hiddenText();
  const node = el("div.timeline", {}, bars, before, words);

  function update(spans, now, range) {
    const begin = now - range;
    const shown = spans.map((span, index) => ({ ...span, index })).filter((span) => span.end > begin || (span.end === now && span.begin >= begin));
    sync(bars, shown, (span) => String(span.index), bar);
    for (const [place, span] of shown.entries()) {
      const node = bars.children[place];
      const left = Math.max(0, (span.begin - begin) / range);
      const right = Math.min(1, (span.end - begin) / range);
      setStyle(node, "left", `${(100 * left).toFixed(3)}%`);
      setStyle(node, "width", `${(100 * (right - left)).toFixed(3)}%`);
    }
    const end = spans.at(-1)?.end ?? now;
    setHidden(before, shown.length > 0);
    setText(before, `◂ ended ${seconds(Math.round(now - end))} ago`);
    setText(words, sums(spans).map(([phase, length]) => `${phase} ${seconds(length)}`).join(", ") + changes(spans));
  }

  return { node, update };
}

function bar() {
  const label = el("span.label");
  const fill = el("div", {}, label);
  const change = el("span.change");
  const node = el("div.span", {}, fill, change);
  return {
    node,
    update(span) {
      setAttribute(fill, "class", `phase phase-${span.phase}`);
      setAttribute(node, "data-change", span.change);
      setHidden(change, span.change === null);
      setAttribute(node, "title", `${span.phase} ${seconds(span.end - span.begin)}${span.engine === null ? "" : ` on engine ${span.engine}`}${span.change ? `, ${span.change} here` : ""}`);
      setText(label, span.phase);
      setText(change, span.change ? `▸${span.engine}` : "");
    },
  };
}

function changes(spans) {
  return spans
    .filter((span) => span.change)
    .map((span) => `; ${span.change} to engine ${span.engine}`)
    .join("");
}
