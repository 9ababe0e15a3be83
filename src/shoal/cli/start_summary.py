"""What ``shoal serve`` prints when it is ready: access, services and engines, addresses, a curl example."""

import json
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from shoal.cluster.batching_options import BatchingOptions
    from shoal.cluster.status import EngineStatus, ServiceStatus
    from shoal.engine import ServiceInfo

_LABEL_WIDTH = 9
_MOST_LABEL_WIDTH = 24
_ANY_ADDRESS = {"//0.0.0.0:": "//127.0.0.1:", "//[::]:": "//[::1]:"}


def print_access(access: Mapping[str, str], console: Console) -> None:
    """Print which clients may use which routes, each under the label ``open``."""
    for what, who in access.items():
        _print_labelled("open", f"{what}: {who}", console)


def print_engines(
    services: Mapping[str, "ServiceStatus"], engines: Sequence["EngineStatus"], console: Console
) -> None:
    """Print services, kernels, and the KV pools of ready engines."""
    infos = {engine.name: engine.info for engine in engines if engine.info is not None}
    console.print("[bold]services[/]")
    width = min(max(map(len, services), default=0) + 4, _MOST_LABEL_WIDTH)
    for name in services:
        hosts = [info.services[name] for info in infos.values() if name in info.services]
        _print_labelled(f"  {name}", _service_facts(hosts) if hosts else _NOT_LOADED, console, width)
    for kernels in dict.fromkeys(info.kernels for info in infos.values()):
        _print_labelled("compute", kernels, console)
    for name, info in infos.items():
        pool = f"{info.kv_bytes / 2**20:,.1f} MiB"
        most = "" if info.max_running is None else f"; at most {info.max_running:,} requests run at once"
        if len(infos) == 1:
            _print_labelled("KV pool", f"{pool}, shared by all services{most}", console)
        else:
            simulated = any(service.simulated for service in info.services.values())
            device = info.device if simulated else f"{info.device}, {info.threads} threads"
            what = f"{device}, KV pool {pool}: {', '.join(info.services)}"
            _print_labelled("engine", f"{name}  {what}{most}", console)
    for limit in dict.fromkeys(engine.weights_memory_bytes for engine in engines):
        if limit is not None:
            size = f"{limit / 2**20:,.1f} MiB"
            what = f"up to {size} of an engine's are in memory; others come when requests need them"
            _print_labelled("weights", what, console)


def print_batching(batching: "BatchingOptions", console: Console) -> None:
    """Print how requests become batches."""
    facts = [f"formed as {batching.former}"]
    if batching.interval_s is None:
        facts.append("for each idle engine")
    else:
        longer = ", later under load" if batching.load_factor else ""
        facts.append(f"every {batching.interval_s:g} s{longer}")
    if batching.max_batch is not None:
        facts.append(f"of at most {batching.max_batch} requests")
    if batching.slice_tokens is not None:
        facts.append(f"in slices of {batching.slice_tokens} tokens")
    if batching.trust_predictions:
        facts.append(f"as long as the longest output that is predicted ({batching.lengths})")
    _print_labelled("batches", ", ".join(facts), console)


_NOT_LOADED = "in the memory of no engine; a request loads it"


def _service_facts(hosts: Sequence["ServiceInfo"]) -> str:
    """The model of a service, its dtype and size, and its limits on the engines that have it."""
    facts = [hosts[0].model]
    if dtypes := [host.dtype for host in hosts if host.dtype]:
        how = "in" if hosts[0].simulated else "computed in"
        facts.append(f"{how} {' and '.join(dict.fromkeys(dtypes))}")
    if weights := [host.weight_bytes for host in hosts if host.weight_bytes]:
        sizes = dict.fromkeys(f"{size / 2**20:,.0f}" for size in weights)
        random = any(host.described is not None and host.described.format == "random" for host in hosts)
        facts.append(f"{' or '.join(sizes)} MiB of {'random ' if random else ''}weights")
    facts.append(f"{max(host.max_total_tokens for host in hosts):,} tokens a request")
    facts.append(f"KV for {' + '.join(f'{host.kv_tokens:,}' for host in hosts)} tokens")
    return ", ".join(facts)


def print_addresses(
    url: str, service: str, console: Console, *, chats: Collection[str] = (), keyed: bool = False
) -> None:
    """Print the addresses of a server that listens at ``url``, and a curl example for ``service``.

    chats: the services that take chats; for others the example is a completion. keyed: requests need a key.
    """
    for address, own in _ANY_ADDRESS.items():
        url = url.replace(address, own)
    _print_labelled("ready", f"{url}   (Ctrl-C to stop)", console)
    _print_labelled("OpenAI", f"{url}/v1   (base URL for clients)", console)
    _print_labelled("docs", f"{url}/docs", console)
    example = curl_example(url, service, chat=service in chats, keyed=keyed)
    console.print("[bold]try[/]")
    console.print(example, soft_wrap=True, highlight=False, markup=False)


def curl_example(url: str, service: str, *, chat: bool, keyed: bool = False) -> str:
    """A POSIX shell command that requests a chat or a completion."""
    model = json.dumps(service, ensure_ascii=False)
    if chat:
        path, content = (
            "chat/completions",
            '"messages": [{"role": "user", "content": "Why is the sky blue?"}]',
        )
    else:
        path, content = "completions", '"prompt": "The capital of France is"'
    body = f'{{\n  "model": {model}, "max_tokens": 64,\n  {content}}}'
    key = "  -H 'Authorization: Bearer API_KEY' \\\n" if keyed else ""
    return (
        f"curl {shlex.quote(f'{url}/v1/{path}')} \\\n{key}"
        f"  -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


def _print_labelled(label: str, text: str, console: Console, width: int = _LABEL_WIDTH) -> None:
    """Print text after a label; further lines are indented, and words longer than a line are not broken."""
    first = label.ljust(width) if len(label) < width else f"{label}  "
    wrapped = textwrap.fill(
        text,
        max(console.width, 40),
        initial_indent=" " * len(first),
        subsequent_indent=" " * width,
        break_long_words=False,
        break_on_hyphens=False,
    )
    line = Text.assemble((first, "bold"), wrapped[len(first) :])
    console.print(line, soft_wrap=True)
