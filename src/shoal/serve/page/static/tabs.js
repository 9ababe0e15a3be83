// Tabs, with a hash route each: #requests?service=chat opens Requests with these parameters. No element has such an id, since
// browsers would scroll to it and take the focus away.

import { setAttribute, setHidden } from "./dom.js";

const STEPS = { ArrowLeft: -1, ArrowRight: 1 };

/** opened(name, parameters): called for the first tab and whenever the route changes. */
export function startTabs(list, opened) {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const names = tabs.map((tab) => tab.hash.slice(1));

  function show() {
    const [route, query = ""] = location.hash.slice(1).split("?");
    const name = names.includes(route) ? route : names[0];
    for (const [index, tab] of tabs.entries()) {
      const selected = names[index] === name;
      setAttribute(tab, "aria-selected", String(selected));
      setAttribute(tab, "tabindex", selected ? "0" : "-1");
      setHidden(document.getElementById(`panel-${names[index]}`), !selected);
    }
    opened(name, new URLSearchParams(query));
  }

  list.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(document.activeElement);
    let next = null;
    if (event.key in STEPS) next = (at + STEPS[event.key] + tabs.length) % tabs.length;
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = tabs.length - 1;
    else if (event.key === " ") next = at;
    if (at < 0 || next === null) return;
    event.preventDefault();
    tabs[next].focus();
    location.hash = names[next];
  });
  addEventListener("hashchange", show);
  show();
}
