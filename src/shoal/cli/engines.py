"""``shoal engines``: list, add, drain, stop and remove engines of a running server."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from shoal.cli.admin_commands import (
    DEFAULT_URL,
    STYLES,
    AdminKey,
    AsJson,
    NoWait,
    Set,
    Url,
    mebibytes,
    parse_settings,
    print_table,
    run_operation,
)
from shoal.cli.command import Commands

engines = Commands(help="Look at the engines of a running server, and change them.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The engine, as in `shoal engines list`.")]


@engines.command("list")
def list_engines(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Show every engine: its state, device, process and services, and why it last ended.

    **Example:** `shoal engines list --url http://127.0.0.1:9000`
    """
    from shoal.cli.admin_client import AdminClient

    answer = AdminClient(url, admin_key).list("engines")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    headings = ["name", "state", "device", "services", "pid", "requests", "restarts", "heartbeat", "KV"]
    rows = [_row(engine) for engine in answer["data"]]
    if any(engine["weights_memory_bytes"] is not None for engine in answer["data"]):
        headings.append("weights")
        rows = [[*row, _weights(engine)] for row, engine in zip(rows, answer["data"], strict=True)]
    errors = {engine["name"]: engine["last_error"] for engine in answer["data"] if engine["last_error"]}
    print_table(headings, rows)
    for name, error in errors.items():
        Console().print(Text(f"engine {name} ended last: {error}"), soft_wrap=True)


@engines.command()
def add(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="cpu or cuda:0.")],
    name: Annotated[str | None, typer.Option(help="Its name; else a number.")] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A service that it is to have, else all; may be repeated."),
    ] = None,
    settings: Set = None,
    no_wait: NoWait = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Start another engine, and wait until it is ready.

    **Example:** `shoal engines add cpu --name b --service chat --set threads=1 --set kv_memory=64MiB`
    """
    body = parse_settings(settings) | {"device": device}
    body |= {} if name is None else {"name": name}
    body |= {"services": service} if service else {}
    done = "the engine is ready" if name is None else f"engine {name} is ready"
    run_operation(url, admin_key, "POST", "engines", body, no_wait=no_wait, done=done)


@engines.command()
def drain(name: Name, no_wait: NoWait = False, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Give an engine no more requests, move its requests to other engines, and wait until it has none left.

    The only engine of a service cannot be drained. Requests that do not fit into another engine finish on
    this one.

    **Example:** `shoal engines drain b && shoal engines remove b`
    """
    from shoal.cli.admin_client import quote_name

    path, done = f"engines/{quote_name(name)}/drain", f"engine {name} has no requests left"
    run_operation(url, admin_key, "POST", path, no_wait=no_wait, done=done)


@engines.command()
def undrain(name: Name, no_wait: NoWait = False, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Let a drained engine take requests again; a drain in progress ends.

    **Example:** `shoal engines undrain b`
    """
    from shoal.cli.admin_client import quote_name

    path, done = f"engines/{quote_name(name)}/undrain", f"engine {name} takes requests again"
    run_operation(url, admin_key, "POST", path, no_wait=no_wait, done=done)


@engines.command()
def standby(name: Name, no_wait: NoWait = False, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Move the requests of an engine to other engines, and end it until it is activated again.

    The only engine of a service cannot go. Where the server sizes its fleet (`cluster.fleet`), it activates
    the engine itself when it is needed.

    **Example:** `shoal engines standby b`
    """
    from shoal.cli.admin_client import quote_name

    path, done = f"engines/{quote_name(name)}/standby", f"engine {name} is on standby"
    run_operation(url, admin_key, "POST", path, no_wait=no_wait, done=done)


@engines.command()
def activate(name: Name, no_wait: NoWait = False, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Start an engine that is on standby, and wait until it is ready.

    **Example:** `shoal engines activate b`
    """
    from shoal.cli.admin_client import quote_name

    path, done = f"engines/{quote_name(name)}/activate", f"engine {name} is ready"
    run_operation(url, admin_key, "POST", path, no_wait=no_wait, done=done)


@engines.command()
def remove(name: Name, no_wait: NoWait = False, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """End an engine; its requests go on with other engines.

    **Example:** `shoal engines remove b`
    """
    from shoal.cli.admin_client import quote_name

    path, done = f"engines/{quote_name(name)}", f"engine {name} is removed"
    run_operation(url, admin_key, "DELETE", path, no_wait=no_wait, done=done)


def _row(engine: Mapping[str, Any]) -> list[Text]:
    age_s = engine["heartbeat_age_s"]
    return [
        Text(engine["name"]),
        Text(engine["state"], style=STYLES.get(engine["state"], "")),
        Text(engine["device"]),
        Text(", ".join(engine["services"])),
        Text("-" if engine["pid"] is None else str(engine["pid"])),
        Text(str(engine["requests"])),
        Text(str(engine["restarts"])),
        Text("-" if age_s is None else f"{age_s:.1f} s"),
        Text(mebibytes(engine["kv_bytes"])),
    ]


def _weights(engine: Mapping[str, Any]) -> Text:
    """Size of the weights in its memory, and the limit, if there is one."""
    limit_bytes = engine["weights_memory_bytes"]
    limit = "" if limit_bytes is None else f" of {mebibytes(limit_bytes)}"
    return Text(mebibytes(engine["weight_bytes"]) + limit)
