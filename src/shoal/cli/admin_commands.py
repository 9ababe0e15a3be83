"""Shared by ``shoal engines`` and ``shoal services``: options, tables, and waiting for an operation."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Url = Annotated[str, typer.Option(help="The server.")]
AdminKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar="SHOAL_ADMIN_KEY",
        help="The server's admin key; one without any keys answers only on its own machine.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's response as JSON.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Start it and print its operation, as JSON.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A key as in the configuration file; may be repeated."),
]
DEFAULT_URL = "http://127.0.0.1:8000"
STYLES = {
    "ready": "green",
    "waiting": "red",
    "failed": "red",
    "pulling": "yellow",
    "loading": "yellow",
    "draining": "yellow",
    "standby": "dim",
}
"""Styles of the states of engines and services."""


def run_operation(
    url: str,
    admin_key: str | None,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    no_wait: bool,
    done: str | None,
) -> None:
    """Start an operation on the server, show its progress until it ends, and print ``done``, if anything.

    no_wait: print the operation and return at once. Raises as ``AdminClient`` does.
    """
    import json

    from shoal.cli.admin_client import AdminClient
    from shoal.cli.progress import ProgressDisplay

    client = AdminClient(url, admin_key)
    operation = client.start(method, path, body)
    if no_wait:
        typer.echo(json.dumps(operation, indent=2))
        return
    with ProgressDisplay() as progress:
        client.wait(operation, progress.update)
    if done is not None:
        typer.echo(done)


def parse_settings(pairs: Sequence[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` pairs as nested JSON; a dot in a key begins a section.

    Raises ConfigError for a pair without a key or ``=``, and for duplicate keys.
    """
    from shoal.config.policies import put
    from shoal.config.setting_tree import Node, Scalar, Table, problem

    entries: dict[str, Node] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise problem("--set", "", f"expected KEY=VALUE, got {pair!r}")
        put(entries, key.strip().split("."), Scalar(value, "--set"), "")

    def plain(node: Node) -> Any:
        if isinstance(node, Table):
            return {key: plain(inner) for key, inner in node.entries.items()}
        return node.text if isinstance(node, Scalar) else None

    return {key: plain(node) for key, node in entries.items()}


def mebibytes(num_bytes: int | None) -> str:
    """A size for a table; ``-`` if it is not known."""
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Print a table that fits into 80 columns, except for long lists."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    for heading in headings:
        # Only lists wrap.
        table.add_column(heading, no_wrap=heading not in ("services", "engines", "weights"), overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
