"""``shoal services``: list, add, remove, load, unload and pin services of a running server."""

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

services = Commands(help="Look at the services of a running server, and change them.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The service, as in `shoal services list`.")]


@services.command("list")
def list_services(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Show every service: its model, state, engines and waiting requests.

    **Example:** `shoal services list --json`
    """
    from shoal.cli.admin_client import AdminClient

    answer = AdminClient(url, admin_key).list("services")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    headings = ("name", "model", "state", "engines", "weights", "size", "waiting", "resumed")
    print_table(headings, [_row(service) for service in answer["data"]])
    for service in answer["data"]:
        if service["error"]:
            text = f"service {service['name']} could not be loaded: {service['error']}"
            Console().print(Text(text), soft_wrap=True)


@services.command()
def add(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `shoal serve`, at the server.")],
    name: Annotated[str | None, typer.Option(help="What clients put into `model`; else the model.")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="An engine that is to have it, else all; may be repeated."),
    ] = None,
    settings: Set = None,
    no_wait: NoWait = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Fetch a model, serve it along with the others, and wait until it takes requests.

    **Example:** `shoal services add gemma3-270m --name complete --set slo.ttft=2s --set idle_after=10min`
    """
    body = parse_settings(settings) | {"model": model}
    body |= {} if name is None else {"name": name}
    body |= {"engines": engine} if engine else {}
    done = f"service {model if name is None else name} is ready"
    run_operation(url, admin_key, "POST", "services", body, no_wait=no_wait, done=done)


@services.command()
def remove(name: Name, no_wait: NoWait = False, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Refuse new requests for a service, and remove it when its requests have ended.

    **Example:** `shoal services remove complete`
    """
    from shoal.cli.admin_client import quote_name

    path, done = f"services/{quote_name(name)}", f"service {name} is removed"
    run_operation(url, admin_key, "DELETE", path, no_wait=no_wait, done=done)


@services.command()
def load(name: Name, no_wait: NoWait = False, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Load a service that was unloaded, before a request does.

    **Example:** `shoal services load complete`
    """
    from shoal.cli.admin_client import quote_name

    path, done = f"services/{quote_name(name)}/load", f"service {name} is loaded"
    run_operation(url, admin_key, "POST", path, no_wait=no_wait, done=done)


@services.command()
def unload(name: Name, no_wait: NoWait = False, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Unload a service when its requests have ended; the next request loads it again.

    If another request arrives before that, the service stays loaded and the command fails.

    **Example:** `shoal services unload complete`
    """
    from shoal.cli.admin_client import quote_name

    path, done = f"services/{quote_name(name)}/unload", f"service {name} is unloaded"
    run_operation(url, admin_key, "POST", path, no_wait=no_wait, done=done)


@services.command()
def pin(name: Name, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Keep a service's weights in the memory of its engines, where `weights.memory` holds not all services.

    The next restart of the server forgets it; `pin: true` in the configuration does not.

    **Example:** `shoal services pin chat`
    """
    from shoal.cli.admin_client import quote_name

    path, done = f"services/{quote_name(name)}/pin", f"service {name} is pinned"
    run_operation(url, admin_key, "POST", path, no_wait=False, done=done)


@services.command()
def unpin(name: Name, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Let a service's weights leave the memory again for those of other services.

    **Example:** `shoal services unpin chat`
    """
    from shoal.cli.admin_client import quote_name

    path, done = f"services/{quote_name(name)}/unpin", f"service {name} is no longer pinned"
    run_operation(url, admin_key, "POST", path, no_wait=False, done=done)


def _row(service: Mapping[str, Any]) -> list[Text]:
    return [
        Text(service["name"]),
        Text(service["model"]),
        _state(service),
        Text(", ".join(service["engines"])),
        Text(_weights(service["weights"]) + (" pinned" if service["pinned"] else "")),
        Text(mebibytes(service["weight_bytes"])),
        Text(str(service["waiting"])),
        Text(str(service["resumed"])),
    ]


def _state(service: Mapping[str, Any]) -> Text:
    """The state, and how many engines are ready where not all are."""
    state, ready, wanted = service["state"], service["ready"], service["wanted"]
    if ready == wanted:
        return Text(state, style=STYLES.get(state, ""))
    return Text(f"{state} {ready} of {wanted}", style="yellow" if ready else "red")


def _weights(places: Mapping[str, str]) -> str:
    """Where weights are; names of engines only where they differ."""
    if len(set(places.values())) <= 1:
        return next(iter(places.values()), "-")
    return ", ".join(f"{engine}: {place}" for engine, place in places.items())
