"""The /docs page: HTML of the OpenAPI document, without external resources."""

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --dim: #5c6b7a; --paper: #ffffff; --line: #dfe5ea;
  --panel: #f5f7f9; --accent: #0b6e8a; --get: #22703f; --post: #0b5aa8; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde5ec; --dim: #93a2b0; --paper: #12181e;
  --line: #2b3640; --panel: #1a222a; --accent: #5cc2dd; --get: #67c58a; --post: #6cb2f2; } }
* { box-sizing: border-box; }
body { margin: 0; display: grid; grid-template-columns: 17rem minmax(0, 1fr); color: var(--ink);
  background: var(--paper); font: 15px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
nav { position: sticky; top: 0; height: 100vh; overflow: auto; padding: 1.6rem 1.2rem;
  background: var(--panel); border-right: 1px solid var(--line); }
nav h1 { margin: 0; font-size: 1.35rem; } nav p { margin: .1rem 0 1.2rem; color: var(--dim); }
nav a { display: block; padding: .22rem 0; color: inherit; text-decoration: none; font-size: .88rem;
  overflow-wrap: anywhere; } nav a:hover { color: var(--accent); }
main { padding: 1.8rem clamp(1rem, 4vw, 3.5rem) 5rem; max-width: 68rem; }
section { padding: 1.5rem 0; border-bottom: 1px solid var(--line); }
h2 { margin: 0 0 .3rem; font: 600 1.15rem/1.4 ui-monospace, Menlo, Consolas, monospace; }
h3 { margin: 1.3rem 0 .4rem; font-size: .8rem; letter-spacing: .06em; text-transform: uppercase;
  color: var(--dim); }
b.method { display: inline-block; min-width: 3.1rem; margin-right: .5rem; font: 700 .72rem/1.7 ui-monospace,
  Menlo, Consolas, monospace; text-align: center; color: var(--paper); background: var(--get);
  border-radius: .25rem; } b.POST { background: var(--post); } nav b.method { min-width: 2.6rem; }
table { width: 100%; border-collapse: collapse; } td { padding: .38rem .8rem .38rem 0; vertical-align: top;
  border-top: 1px solid var(--line); } td:first-child { width: 15rem; }
code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .87em; }
pre { padding: .9rem 1rem; overflow: auto; background: var(--panel); border: 1px solid var(--line);
  border-radius: .4rem; } small { color: var(--dim); } em { color: var(--accent); font-style: normal; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--dim); }
@media (max-width: 46rem) { body { display: block; } nav { position: static; height: auto; } }
"""
_INERT_PREFIXES = ("Ignored", "Not supported")
_MAX_DEPTH = 3


def docs_page(document: Mapping[str, Any]) -> str:
    """The HTML page of an OpenAPI document."""
    schemas = document["components"]["schemas"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    links = "".join(
        f'<a href="#{_anchor(method, path)}">{_method(method)}{escape(path)}</a>'
        for method, path, _ in operations
    )
    sections = "".join(_operation(method, path, about, schemas) for method, path, about in operations)
    title, version = escape(document["info"]["title"]), escape(document["info"]["version"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} HTTP interface</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<nav><h1>{title}</h1><p>version {version}</p>{links}"
        '<p></p><a href="/openapi.json">OpenAPI document</a></nav>'
        f"<main>{sections}</main></body></html>"
    )


def _anchor(method: str, path: str) -> str:
    return f"{method}-{re.sub('[^a-z0-9]+', '-', path).strip('-')}"


def _method(method: str) -> str:
    return f'<b class="method {method}">{method}</b>'


def _operation(method: str, path: str, about: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    parts = [
        f'<section id="{_anchor(method, path)}"><h2>{_method(method)}{escape(path)}</h2>',
        f"<div>{_text(about.get('description', ''))}</div>",
    ]
    if "requestBody" in about:
        body = _resolve(about["requestBody"]["content"]["application/json"]["schema"], schemas)
        parts += ["<h3>Request body</h3>", *_fields(body, schemas)]
    parts.append("<h3>Answers</h3><table>")
    for status, answer in about["responses"].items():
        kinds = "".join(
            f"<br><small>{escape(kind)}</small> {_answer_type(content.get('schema', {}))}"
            for kind, content in answer.get("content", {}).items()
            if status == "200"
        )
        parts.append(f"<tr><td><code>{status}</code></td><td>{_text(answer['description'])}{kinds}</td></tr>")
    return "".join([*parts, "</table></section>"])


def _fields(body: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """A table of the fields; fields without effect are folded away."""
    required = body.get("required", ())
    rows: dict[bool, list[str]] = {True: [], False: []}
    for name, schema in sorted(body.get("properties", {}).items(), key=lambda item: item[0] not in required):
        note = " <em>required</em>" if name in required else ""
        text = schema.get("description") or _resolve(schema, schemas).get("description", "")
        kind = escape(_type(schema, schemas))
        row = (
            f"<tr><td><code>{escape(name)}</code>{note}<br><small>{kind}</small></td>"
            f"<td>{_text(text)}</td></tr>"
        )
        rows[not text.startswith(_INERT_PREFIXES)].append(row)
    yield f"<table>{''.join(rows[True])}</table>"
    if rows[False]:
        summary = f"{len(rows[False])} more that have no effect, or must be left at their defaults"
        yield f"<details><summary>{summary}</summary><table>{''.join(rows[False])}</table></details>"


def _resolve(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """The referenced schema, also if the reference is the only branch besides null."""
    branches = [branch for branch in schema.get("anyOf", ()) if branch.get("type") != "null"]
    reference = (branches[0] if len(branches) == 1 else schema).get("$ref")
    return schemas[reference.rpartition("/")[2]] if reference else schema


def _type(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int = 0) -> str:
    """A few words for a schema's type."""
    if depth < _MAX_DEPTH and (found := _resolve(schema, schemas)) is not schema:
        schema = found
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if "const" in schema:
        return f"only {schema['const']!r}"
    if branches := schema.get("anyOf"):
        kinds = [_type(branch, schemas, depth) for branch in branches if branch.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), schemas, depth + 1)}"
    if schema.get("properties") and depth < _MAX_DEPTH:
        return "object: " + ", ".join(schema["properties"])
    return f"{schema.get('type', 'any')}{_range(schema)}"


def _range(schema: Mapping[str, Any]) -> str:
    """The bounds of a number, except those of an int32."""
    words = []
    for key, word in (
        ("minimum", "from"),
        ("exclusiveMinimum", "above"),
        ("maximum", "to"),
        ("exclusiveMaximum", "below"),
    ):
        bound = schema.get(key)
        if bound is not None and abs(bound) < 2**31 - 1:
            words.append(f"{word} {bound}")
    return f" {' '.join(words)}" if words else ""


def _answer_type(schema: Mapping[str, Any]) -> str:
    reference = schema.get("$ref")
    return f"<code>{escape(reference.rpartition('/')[2])}</code>" if reference else ""


def _text(text: str) -> str:
    """Text with `code` in it, as HTML."""
    return re.sub("`+([^`]+)`+", r"<code>\1</code>", escape(text))
