// The tab Services: operators load, unload, pin, add and remove services, and drain and remove engines.

import { addForm } from "./add_form.js";
import { confirmed } from "./confirm.js";
import { el, setAttribute, setHidden, setText, sync } from "./dom.js";
import { bytes, number, plural } from "./format.js";
import { operations } from "./operations.js";
import { showSwatch, swatch } from "./service_colours.js";

export function servicesView() {
  const changes = operations();
  const services = managedTable("Services", ["Service", "Model", "State", "Engines", "Requests"]);
  const engines = managedTable("Engines", ["Engine", "Device", "State", "Requests", "Weights"]);
  const node = el(
    "div.managing",
    {},
    el("h2", {}, "Services"),
    services.node,
    addForm(
      "Add a service",
      { model: { label: "Model", required: true, hint: "A name of a bundled model, an id on the hub, or a path on the server." }, name: { label: "Name", hint: "The model's, if left empty." } },
      '{"idle_after": "10min", "engines": ["0"]}',
      (settings) => changes.change("POST", "services", settings),
    ),
    el("h2", {}, "Engines"),
    engines.node,
    addForm("Add an engine", { device: { label: "Device", required: true, hint: "Such as cpu or cuda:1." } }, '{"services": ["chat"]}', (settings) =>
      changes.change("POST", "engines", settings),
    ),
    el("h2", {}, "Operations"),
    changes.node,
  );

  function show(snapshot) {
    services.update(snapshot.services, (name) => serviceRow(name, changes));
    engines.update(snapshot.engines, (name) => engineRow(name, changes));
  }

  return { node, show, open: changes.refresh };
}

function managedTable(title, columns) {
  const body = el("tbody", { role: "rowgroup" });
  const heads = [...columns, "Actions"].map((label) => el("th", { scope: "col", role: "columnheader" }, label));
  const table = el(
    "table.managed",
    { role: "table" },
    el("caption.hidden-text", {}, title),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)),
    body,
  );
  const empty = el("p.dim", {}, "There is none yet.");
  const update = (items, createRow) => {
    setHidden(table, items.length === 0);
    setHidden(empty, items.length > 0);
    sync(body, items, (item) => item.name, (item) => createRow(item.name));
  };
  return { node: el("div", {}, empty, table), update };
}

// Roles are written out, since narrow windows show rows as blocks, and browsers then forget that they are a table's.
function tableRow(head, ...cells) {
  return el("tr", { role: "row" }, el("th.text", { scope: "row", role: "rowheader" }, ...head), ...cells);
}

function cell(name, ...children) {
  return el(`td.${name}`, { role: "cell" }, ...children);
}

function serviceRow(name, changes) {
  // A name may be an id on the hub, with slashes that the route keeps.
  const path = `services/${name.split("/").map(encodeURIComponent).join("/")}`;
  const mark = swatch(name);
  const cells = { model: cell("text"), state: el("span.state"), engines: cell("text"), requests: cell("requests-now") };
  const load = action("Load", name, () => changes.change("POST", `${path}/load`));
  const unload = action("Unload", name, () => changes.change("POST", `${path}/unload`));
  const pin = action("Pin", name, () => changes.change("POST", `${path}/pin`));
  const unpin = action("Unpin", name, () => changes.change("POST", `${path}/unpin`));
  const remove = action("Remove", name, async () => {
    if (await confirmed(`Remove the service ${name}? New requests for it are refused at once; it is forgotten when those under way have ended.`, "Remove")) {
      await changes.change("DELETE", path);
    }
  });
  const node = tableRow(
    [el("span.service-name", {}, mark, name)],
    cells.model,
    cell("now", cells.state),
    cells.engines,
    cells.requests,
    cell("actions", load, unload, pin, unpin, remove),
  );
  return {
    node,
    update(service) {
      showSwatch(mark, name);
      setText(cells.model, service.model);
      setText(cells.state, service.state);
      setAttribute(cells.state, "data-state", service.state);
      setText(cells.engines, enginesText(service));
      setText(cells.requests, `${number(service.running)} running, ${number(service.waiting)} waiting`);
      setAttribute(load, "disabled", !["unloaded", "failed"].includes(service.state));
      setAttribute(unload, "disabled", service.state !== "ready");
      setHidden(pin, service.pinned);
      setHidden(unpin, !service.pinned);
    },
  };
}

/** "0 (resident), 1 (absent); pinned". */
function enginesText({ engines, pinned }) {
  const places = Object.entries(engines).map(([engine, { weights }]) => `${engine} (${weights})`).join(", ") || "–";
  return pinned ? `${places}; pinned` : places;
}

function engineRow(name, changes) {
  const path = `engines/${encodeURIComponent(name)}`;
  const cells = { device: cell("text"), state: el("span.state"), requests: cell("requests-now"), weights: cell("size") };
  const drain = action("Drain", `engine ${name}`, () => changes.change("POST", `${path}/drain`));
  const undrain = action("Undrain", `engine ${name}`, () => changes.change("POST", `${path}/undrain`));
  const standby = action("Standby", `engine ${name}`, () => changes.change("POST", `${path}/standby`));
  const activate = action("Activate", `engine ${name}`, () => changes.change("POST", `${path}/activate`));
  const remove = action("Remove", `engine ${name}`, async () => {
    if (await confirmed(`Remove engine ${name}? Its requests go on at other engines.`, "Remove")) await changes.change("DELETE", path);
  });
  const node = tableRow(
    [name],
    cells.device,
    cell("now", cells.state),
    cells.requests,
    cells.weights,
    cell("actions", drain, undrain, standby, activate, remove),
  );
  return {
    node,
    update(engine) {
      setText(cells.device, engine.device);
      setText(cells.state, engine.state === "waiting" ? "waiting for its restart" : engine.state);
      setAttribute(cells.state, "data-state", engine.state);
      setText(cells.requests, plural(engine.requests, "request"));
      setText(cells.weights, bytes(engine.weight_bytes));
      setAttribute(drain, "disabled", engine.state === "draining");
      setAttribute(undrain, "disabled", engine.state !== "draining");
      setHidden(standby, engine.state === "standby");
      setAttribute(standby, "disabled", engine.state === "draining");
      setHidden(activate, engine.state !== "standby");
    },
  };
}

function action(verb, what, run) {
  return el("button", { type: "button", "aria-label": `${verb} ${what}`, on: { click: run } }, verb);
}
