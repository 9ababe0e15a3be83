// Building elements, and changing them in place: what has focus or is hovered is not built anew.

const SVG = "http://www.w3.org/2000/svg";
const entries = new WeakMap(); // parent -> Map of key -> entry, for sync

/** An element: el("td.number", {title: "..."}, children). Children are nodes or text; text is never read as markup. */
export function el(name, attributes = {}, ...children) {
  return build((tag) => document.createElement(tag), name, attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return build((tag) => document.createElementNS(SVG, tag), name, attributes, children);
}

function build(create, name, attributes, children) {
  const [tag, ...classes] = name.split(".");
  const node = create(tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else {
      setAttribute(node, key, value);
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Set an attribute; true: without a value; null and false: remove it. Writes only what changed. */
export function setAttribute(node, key, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(key)) node.removeAttribute(key);
    return;
  }
  const text = value === true ? "" : String(value);
  if (node.getAttribute(key) !== text) node.setAttribute(key, text);
}

export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setStyle(node, property, value) {
  if (node.style.getPropertyValue(property) !== value) node.style.setProperty(property, value);
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/**
 * Make the children of `parent` those of `items`, in their order.
 *
 * key(item): a string that stays the same over time. create(item): {node, update(item)}; update is called for each item.
 */
export function sync(parent, items, key, create) {
  const known = entries.get(parent) ?? new Map();
  entries.set(parent, known);
  const active = document.activeElement;
  const wanted = new Set(items.map(key));
  for (const [name, entry] of known) {
    if (!wanted.has(name)) {
      entry.node.remove();
      known.delete(name);
    }
  }
  let cursor = parent.firstChild;
  for (const item of items) {
    let entry = known.get(key(item));
    if (!entry) {
      entry = create(item);
      known.set(key(item), entry);
    }
    entry.update(item);
    if (entry.node === cursor) cursor = cursor.nextSibling;
    else parent.insertBefore(entry.node, cursor);
  }
  // A node that is moved loses the focus.
  if (active !== document.activeElement && parent.contains(active)) active.focus({ preventScroll: true });
}

/** A visually hidden text, for screen readers. */
export function hiddenText(text = "") {
  return el("span.hidden-text", {}, text);
}

/** A label with its control. */
export function field(label, control, hint = "") {
  const words = el("span.label", {}, label);
  return el("label.field", {}, words, control, hint ? el("span.hint.dim", {}, hint) : null);
}
