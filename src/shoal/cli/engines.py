"""``shoal engines`` and ``shoal services``: what a running server has."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

engines = typer.Typer(
    help="Look at the engines of a running server.", no_args_is_help=True, rich_markup_mode="markdown"
)
services = typer.Typer(
    help="Look at the services of a running server.", no_args_is_help=True, rich_markup_mode="markdown"
)

Url = Annotated[str, typer.Option(help="The server.")]
AdminKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar="SHOAL_ADMIN_KEY",
        help="The server's admin key; without one it answers only on its own machine.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the server says, as JSON.")]
DEFAULT_URL = "http://127.0.0.1:8000"
_STYLES = {"ready": "green", "waiting": "red", "loading": "yellow", "draining": "yellow"}


@engines.command("list")
def list_engines(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Show every engine: its state, device and process, what it serves and why it ended last.

    **Example:** `shoal engines list --url http://127.0.0.1:9000`
    """
    from shoal.cli.admin_client import ask_admin

    answer = ask_admin(url, admin_key, "engines")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    headings = ("name", "state", "device", "services", "pid", "requests", "restarts", "heartbeat", "KV")
    errors = {engine["name"]: engine["last_error"] for engine in answer["data"] if engine["last_error"]}
    _print(headings, [_engine_row(engine) for engine in answer["data"]])
    for name, error in errors.items():
        Console().print(Text(f"engine {name} ended last: {error}"), soft_wrap=True)


@services.command("list")
def list_services(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Show every service: its model and engines, and the requests that wait for one.

    **Example:** `shoal services list --json`
    """
    from shoal.cli.admin_client import ask_admin

    answer = ask_admin(url, admin_key, "services")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    headings = ("name", "model", "engines", "ready", "waiting", "resumed")
    _print(headings, [_service_row(service) for service in answer["data"]])


def _engine_row(engine: Mapping[str, Any]) -> list[Text]:
    age_s, kv_bytes = engine["heartbeat_age_s"], engine["kv_bytes"]
    return [
        Text(engine["name"]),
        Text(engine["state"], style=_STYLES.get(engine["state"], "")),
        Text(engine["device"]),
        Text(", ".join(engine["services"])),
        Text(_or_dash(engine["pid"])),
        Text(str(engine["requests"])),
        Text(str(engine["restarts"])),
        Text("-" if age_s is None else f"{age_s:.1f} s"),
        Text("-" if kv_bytes is None else f"{kv_bytes / 2**20:,.1f} MiB"),
    ]


def _service_row(service: Mapping[str, Any]) -> list[Text]:
    ready, wanted = service["ready"], service["wanted"]
    return [
        Text(service["name"]),
        Text(service["model"]),
        Text(", ".join(service["engines"])),
        Text(f"{ready} of {wanted}", style="green" if ready == wanted else "yellow" if ready else "red"),
        Text(str(service["waiting"])),
        Text(str(service["resumed"])),
    ]


def _print(headings: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in headings:
        # Lists may take several lines; everything else fits into 80 columns.
        table.add_column(heading, no_wrap=heading not in ("services", "engines"), overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
