// A KV pool as one bar: per service live, cached, free inside; then other services, and what belongs to none.

import { el, setAttribute, setHidden, setStyle, setText, sync } from "./dom.js";
import { bytes, share } from "./format.js";
import { serviceClass, serviceNumber, showSwatch } from "./service_colours.js";

const PARTS = ["live", "cached", "free"];

/** {node, update(kv)}. */
export function poolPicture() {
  const summary = el("span");
  const bar = el("div.pool", { role: "img" });
  const services = el("div.pool-services");
  const other = el("div.part.other", { title: "other services" });
  const rest = el("div.part.unowned");
  bar.append(services, other, rest);
  const legend = el("ul.legend");
  const fragments = el("p.dim.fragments");
  const key = el(
    "p.pattern-key",
    { "aria-hidden": "true" },
    ...PARTS.map((part) => el("span", {}, el(`span.sample.s0.${part}`), part === "free" ? "free for it only" : part)),
    el("span", {}, el("span.sample.unowned"), "free"),
  );
  const node = el("div.pool-box", {}, el("p", {}, el("strong", {}, "KV pool "), summary), bar, key, legend, fragments);

  function update(kv) {
    const total = kv.total_bytes;
    const rows = byNumber(kv);
    const known = rows.reduce((sum, row) => sum + row.bytes, 0);
    const others = Math.max(0, total - known - kv.free_bytes);
    const used = total - kv.free_bytes;
    setText(summary, `${bytes(used)} of ${bytes(total)} belong to services (${share(used, total)}); ${bytes(kv.free_bytes)} free`);
    setAttribute(bar, "aria-label", `KV pool of ${bytes(total)}: ${rows.map((row) => `${row.name} ${share(row.bytes, total)}`).join(", ")}, free ${share(kv.free_bytes, total)}`);
    setStyle(services, "width", `${(100 * known) / total}%`);
    for (const row of rows) row.share = share(row.bytes, total);
    sync(services, rows, (row) => row.name, (row) => group(row.name));
    setStyle(other, "width", `${(100 * others) / total}%`);
    setStyle(rest, "width", `${(100 * kv.free_bytes) / total}%`);
    setAttribute(rest, "title", `free: ${bytes(kv.free_bytes)}`);
    // The remainder of less than a block is not worth a line.
    const shownOthers = others > total / 200 ? [{ name: null, bytes: others, share: share(others, total) }] : [];
    sync(legend, [...rows, ...shownOthers], (row) => row.name ?? "", (row) => legendItem(row.name));
    setText(fragments, `Fragmentation: of the live part, ${bytes(kv.unfilled_bytes)} are not filled yet and ${bytes(kv.padding_bytes)} are padding; ${bytes(kv.external_bytes)} are free for one service only (${share(kv.unfilled_bytes + kv.padding_bytes + kv.external_bytes, total)} of the pool together). Cached blocks are given up when others need them.`);
    setHidden(legend, rows.length === 0);
  }

  return { node, update };
}

function byNumber(kv) {
  return Object.entries(kv.services)
    .map(([name, { live_bytes: live, cached_bytes: cached, free_bytes: free }]) => ({ name, live, cached, free, bytes: live + cached + free }))
    .sort((one, two) => serviceNumber(one.name) - serviceNumber(two.name));
}

function group(name) {
  const parts = Object.fromEntries(PARTS.map((part) => [part, el(`div.part.${part}`, { "data-part": part })]));
  const chip = el("span.chip");
  const node = el("div", { "data-service": name }, ...Object.values(parts), chip);
  return {
    node,
    update(row) {
      setAttribute(node, "class", `group ${serviceClass(name)}`);
      setAttribute(node, "title", describe(row));
      setStyle(node, "flex-grow", String(row.bytes));
      for (const part of PARTS) setStyle(parts[part], "flex-grow", String(row[part]));
      setText(chip, serviceNumber(name));
    },
  };
}

function describe(row) {
  return `${row.name}: live ${bytes(row.live)}, cached ${bytes(row.cached)}, free for it only ${bytes(row.free)}`;
}

function legendItem(name) {
  const mark = el("span", { "aria-hidden": "true" });
  const part = el("span.share");
  const detail = el("span.dim.detail");
  const node = el("li", {}, mark, el("span.name", { title: name ?? "" }, name ?? "other services"), part, detail);
  return {
    node,
    update(row) {
      if (name === null) setAttribute(mark, "class", "sample other");
      else showSwatch(mark, name);
      setText(part, row.share);
      setText(detail, name === null ? bytes(row.bytes) : `live ${bytes(row.live)} · cached ${bytes(row.cached)} · free ${bytes(row.free)}`);
    },
  };
}
