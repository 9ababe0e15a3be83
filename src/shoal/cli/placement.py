"""``shoal placement``: show which engines take requests of which service, and why, and change it by hand."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from shoal.cli.admin_commands import (
    DEFAULT_URL,
    AdminKey,
    AsJson,
    NoWait,
    Url,
    print_table,
    run_operation,
)
from shoal.cli.command import Commands

placement = Commands(help="Look at the placement of services on the engines of a running server.")


@placement.command()
def show(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Show the engines of every service, its requests in the last interval, and what was decided then.

    **Example:** `shoal placement show --url http://127.0.0.1:9000`
    """
    from shoal.cli.admin_client import AdminClient

    answer = AdminClient(url, admin_key).get("placement")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    last = answer["last"]
    services = {} if last is None else last["services"]
    headings = ["service", "engines", "came", "goals met", "latency"]
    print_table(headings, [_row(name, own, services.get(name)) for name, own in answer["placement"].items()])
    for line in _remarks(answer):
        Console().print(Text(line), soft_wrap=True)


@placement.command()
def plan(
    url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False, no_wait: NoWait = False
) -> None:
    """Search the best placement for the latest requests, and show what it would change.

    The server simulates these requests on its engines, with step times that it has learned; that takes up to
    `cluster.placement.search_time`. Nothing is changed.

    **Example:** `shoal placement plan --url http://127.0.0.1:9000`
    """
    _propose("plan", url, admin_key, as_json=as_json, no_wait=no_wait)


@placement.command()
def apply(
    url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False, no_wait: NoWait = False
) -> None:
    """Search the best placement for the latest requests, and change to it if the gain is worth it.

    Services are loaded where they come to before they leave other engines; running requests move live.

    **Example:** `shoal placement apply`
    """
    _propose("apply", url, admin_key, as_json=as_json, no_wait=no_wait)


def _propose(command: str, url: str, admin_key: str | None, *, as_json: bool, no_wait: bool) -> None:
    """Have the server search a placement, and print what it proposed."""
    from shoal.cli.admin_client import AdminClient

    run_operation(url, admin_key, "POST", f"placement/{command}", no_wait=no_wait, done=None)
    if no_wait:
        return
    proposal = AdminClient(url, admin_key).get("placement")["proposal"]
    if as_json:
        typer.echo(json.dumps(proposal, indent=2))
        return
    typer.echo(f"for the last {proposal['requests']} requests, of {proposal['window_s']:.0f} s:")
    if not proposal["steps"]:
        typer.echo(f"the placement should stay: {proposal['why']}")
        return
    word = "changed" if command == "apply" else "would change"
    typer.echo(f"{word}: {', '.join(proposal['steps'])} ({proposal['why']})")


@placement.command("set")
def set_engines(
    service: Annotated[str, typer.Argument(metavar="SERVICE", help="As in `shoal services list`.")],
    engines: Annotated[str, typer.Argument(metavar="ENGINE[,ENGINE...]", help="All of its engines.")],
    no_wait: NoWait = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Have exactly these engines take the requests of a service, and wait until they do.

    Its running requests on other engines move to these. A server that searches its placement may change it
    again.

    **Example:** `shoal placement set chat 0,b`
    """
    names = [name.strip() for name in engines.split(",") if name.strip()]
    body = {"service": service, "engines": names}
    done = f"service {service} is on {', '.join(names)}"
    run_operation(url, admin_key, "POST", "placement", body, no_wait=no_wait, done=done)


def _row(name: str, engines: list[str], traffic: Mapping[str, Any] | None) -> list[Text]:
    row = [Text(name), Text(", ".join(engines))]
    if traffic is None:
        return [*row, Text("-"), Text("-"), Text("-")]
    latency = traffic["mean_latency_s"]
    return [
        *row,
        Text(str(traffic["arrived"])),
        Text(f"{traffic['attainment']:.1%}" if traffic["ended"] else "-"),
        Text("-" if latency is None else f"{latency:.2f} s"),
    ]


def _remarks(answer: Mapping[str, Any]) -> list[str]:
    """What is decided by whom, and what was decided last."""
    if answer["policy"] == "fixed":
        lines = ["the placement is fixed"]
    else:
        lines = [f"the placement follows the load; the present interval has {answer['interval_s']:.0f} s"]
    if (last := answer["last"]) is not None:
        decided = "was to change" if last["changes"] else "stayed"
        lines.append(f"after the last interval, of {last['length_s']:.0f} s, it {decided}: {last['why']}")
    if (change := answer["change"]) is not None:
        outcome = change["outcome"] or "under way"
        lines.append(f"the last change, {', '.join(change['steps'])}: {outcome}")
    return lines
