"""Command-line flags for the keys of the configuration: a decorator that adds them to a command."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.config import Flag, flag_settings
from shoal.config.sections import Section
from shoal.core import ConfigError
from shoal.core.units import parse_number

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file; flags go over what it says."),
]

_ENGINES = "Services and engines"
_PANELS = {
    "kv_cache": "KV memory",
    "weights": "Weights",
    "scheduler": "Scheduler",
    "cluster": "Cluster",
    "server": "Server",
    "workload": "Workload",
    "latency": "Step times",
}
"""Titles of groups of flags in the help, by section of the configuration."""


def server_defaults() -> dict[str, str]:
    """Defaults of a server's configuration as YAML text, by key."""
    from shoal.config import config_section
    from shoal.serve import ServerOptions

    return _defaults(config_section(ServerOptions))


def scenario_defaults() -> dict[str, str]:
    """Defaults of a scenario as YAML text, by key."""
    from shoal.config.scenario_file import scenario_section

    return _defaults(scenario_section())


def _defaults(section: Section) -> dict[str, str]:
    keys = {path: key for path, key in section.walk() if not key.required and key.default not in (None, ())}
    return {path: key.kind.show(key.default) for path, key in keys.items()}


def parse_share(text: str, flag: str, *, whole: bool) -> float:
    """A share written as 60% or 0.6, below 100% or, if ``whole``, up to 100%; raises ConfigError."""
    try:
        share = parse_number(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if not 0 < share < 1 and not (whole and share == 1):
        most = "at most" if whole else "below"
        raise ConfigError(f"{flag}: write a share above 0% and {most} 100%, such as 60% or 0.6; got {text}")
    return share


def with_flags(
    flags: Sequence[Flag],
    *,
    models: bool = False,
    services: bool = True,
    defaults: Callable[[], Mapping[str, str]] = server_defaults,
) -> Callable[[Any], Any]:
    """Add ``flags`` and ``--service`` to a command, which receives them as a Table ``settings``.

    models: also take positional MODEL arguments; each becomes a service. services: whether ``--service`` is
    added. defaults: defaults by key, for the help; called only when the help is shown.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)

        @functools.wraps(command)
        def wrapped(context: typer.Context, **arguments: Any) -> None:
            from_environment = [flag.name for flag in flags if _from_environment(flag, context)]
            values = {flag.name: arguments.pop(flag.argument) for flag in flags}
            values.update({flag.name: tuple(values[flag.name] or ()) for flag in flags if flag.several})
            written = (arguments.pop("service") if services else None) or ()
            names = arguments.pop("models", None) or ()
            settings = flag_settings(
                values, services=written, models=names, flags=flags, from_environment=from_environment
            )
            command(**arguments, settings=settings)

        own_parameters = [p for p in signature.parameters.values() if p.name != "settings"]
        flag_parameters = [_service_parameter()] if services else []
        flag_parameters += [_parameter(flag) for flag in flags]
        parameters = [*([_models_parameter()] if models else []), *own_parameters, *flag_parameters]
        keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        keywords.insert(0, _keyword("context", typer.Context))
        wrapped.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in keywords}
        wrapped.flag_defaults = lambda: {  # type: ignore[attr-defined]
            flag.argument: shown for flag in flags if (shown := defaults().get(flag.key)) is not None
        }
        return wrapped

    return decorate


def _from_environment(flag: Flag, context: typer.Context) -> bool:
    """Whether the flag's value comes from its environment variable.

    Raises ConfigError if the variable is empty and the flag is not given: an unfilled variable in a Compose
    file or a systemd unit would otherwise leave the server open.
    """
    if flag.envvar is None:
        return False
    source = context.get_parameter_source(flag.argument)
    given = source is not None and source.name == "COMMANDLINE"
    if not given and flag.envvar in os.environ and not os.environ[flag.envvar].strip():
        raise ConfigError(f"{flag.envvar}: {flag.key}: is set but empty; write a key, or unset it")
    return source is not None and source.name == "ENVIRONMENT"


def _models_parameter() -> inspect.Parameter:
    text = "Models to serve: a name from `shoal models list`, a Hugging Face folder or hub id, a GGUF file."
    argument = typer.Argument(metavar="MODEL", help=text, show_default=False)
    return _keyword("models", Annotated[list[str] | None, argument])


def _service_parameter() -> inspect.Parameter:
    option = typer.Option(
        "--service",
        metavar="NAME=MODEL[,KEY=VALUE..]",
        help="A service and its model, e.g. chat=smollm2,dtype=float32,slo.ttft=2s; may be repeated.",
        rich_help_panel=_ENGINES,
    )
    return _keyword("service", Annotated[list[str] | None, option])


def _parameter(flag: Flag) -> inspect.Parameter:
    panel = _PANELS.get(flag.key.partition(".")[0], _ENGINES)
    if flag.switch:
        switch = typer.Option(f"--{flag.name}/--no-{flag.name}", help=flag.help, rich_help_panel=panel)
        return _keyword(flag.argument, Annotated[bool | None, switch])
    option = typer.Option(
        f"--{flag.name}",
        metavar=flag.metavar,
        help=flag.help,
        envvar=flag.envvar,
        rich_help_panel=panel,
    )
    if flag.several:
        return _keyword(flag.argument, Annotated[list[str] | None, option])
    return _keyword(flag.argument, Annotated[str | None, option])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
