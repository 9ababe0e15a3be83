// Starts the page: the head, the tabs, and the stream of snapshots.

import { setAttribute, setHidden, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { seconds } from "./format.js";
import { History } from "./history.js";
import { forgetKeys, hasKeys, keyForm, watchKeys } from "./keys.js";
import { liveView } from "./live.js";
import { playgroundView } from "./playground.js";
import { requestsView } from "./requests.js";
import { learnServices } from "./service_colours.js";
import { servicesView } from "./services.js";
import { startTabs } from "./tabs.js";

const byId = (id) => document.getElementById(id);
const history = new History();
const views = {
  live: liveView(history),
  requests: requestsView(),
  playground: playgroundView(),
  services: servicesView(),
};
let shown = "live";
let latest = null;
let lost = null; // {since, retryAt, message} while there is no connection
let paused = false;
let unopened = null; // parameters of the shown tab, until there is a snapshot to show

const feed = new Feed({
  snapshot(snapshot) {
    lost = null;
    document.body.classList.remove("locked");
    byId("key-form").replaceChildren();
    history.add(snapshot);
    learnServices(snapshot.services);
    if (!paused || !latest) latest = snapshot;
    showHead(snapshot);
    if (unopened) openShown(unopened);
    else if (!paused) views[shown].show(latest);
  },
  lost(since, retryAt, message) {
    lost = { since, retryAt, message };
    showConnection();
  },
  refused(error) {
    lost = null;
    setStatus("locked", "key needed");
    showConnection();
    document.body.classList.add("locked");
    byId("key-form").replaceChildren(keyForm("live", error.message, () => feed.retry()));
  },
});

function showHead(snapshot) {
  setText(byId("version"), snapshot.version);
  setStatus(snapshot.status, snapshot.status);
  showConnection();
}

function setStatus(kind, word) {
  setAttribute(byId("status"), "data-status", kind);
  setText(byId("status"), word);
  const title = kind === "ok" ? "Shoal" : `${word} – Shoal`;
  if (document.title !== title) document.title = title;
}

// The seconds change too often to be read aloud; that the connection is lost is said once, by the status.
function showConnection() {
  let text = paused ? "paused" : "";
  if (lost) {
    const now = performance.now();
    const wait = Math.max(0, Math.ceil((lost.retryAt - now) / 1000));
    text = `no connection since ${seconds(Math.max(1, Math.round((now - lost.since) / 1000))).replace(/\.0+ /, " ")}`;
    text += wait ? `, next try in ${wait} s` : ", trying";
    setStatus("lost", "no connection");
    setAttribute(byId("connection"), "title", lost.message);
  }
  setText(byId("connection"), text);
  document.body.classList.toggle("stale", lost !== null);
}

function openShown(parameters) {
  unopened = null;
  views[shown].open?.(parameters);
  views[shown].show(latest);
}

for (const [name, view] of Object.entries(views)) byId(`panel-${name}`).append(view.node);

startTabs(byId("tabs"), (name, parameters) => {
  shown = name;
  if (latest) openShown(parameters);
  else unopened = parameters;
});

byId("pause").addEventListener("click", () => {
  paused = !paused;
  setAttribute(byId("pause"), "aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Go on" : "Pause");
  showConnection();
});

byId("forget-keys").addEventListener("click", () => {
  forgetKeys();
  feed.restart();
});
watchKeys(() => setHidden(byId("forget-keys"), !hasKeys()));
setHidden(byId("forget-keys"), !hasKeys());

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && lost) feed.retry();
});
setInterval(() => lost && showConnection(), 1000);
feed.run();
