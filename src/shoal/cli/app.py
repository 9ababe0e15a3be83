"""The ``shoal`` application: its list of commands, and exit codes for errors."""

import errno
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from shoal.cli.bench import bench
from shoal.cli.chat import chat
from shoal.cli.command import Commands
from shoal.cli.demo.command import demo
from shoal.cli.engines import engines
from shoal.cli.generate import generate
from shoal.cli.models import models
from shoal.cli.place import place
from shoal.cli.placement import placement
from shoal.cli.plan import plan
from shoal.cli.profile import profile
from shoal.cli.serve import serve
from shoal.cli.services import services
from shoal.cli.simulate import simulate
from shoal.cli.topology import topology
from shoal.cli.tune import tune
from shoal.cli.version import print_version, version
from shoal.core import ConfigError, InvalidRequest, ModelUnavailable, ModelUnsupported, ShoalError

MISUSE, FAILURE, INTERRUPTED = 2, 1, 130
_MISUSE_ERRORS = (ConfigError, InvalidRequest, ModelUnavailable, ModelUnsupported)

app = Commands(
    name="shoal",
    help="Serve many LLMs on few devices: one KV-cache pool, one stream of iterations, one scheduler.",
    epilog="Start with `shoal demo` or `shoal serve smollm2 gemma3-270m`.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    serve,
    generate,
    chat,
    demo,
    bench,
    profile,
    topology,
    simulate,
    tune,
    plan,
    place,
):
    app.command()(command)
for group, name in (
    (models, "models"),
    (engines, "engines"),
    (placement, "placement"),
    (services, "services"),
):
    app.add_typer(group, name=name)
app.command()(version)


def _print_version(requested: bool) -> None:
    if requested:
        print_version()
        raise typer.Exit


@app.callback()
def _root(
    requested: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None = None, commands: typer.Typer | None = None) -> int:
    """Run a command line (commands: those of ``shoal`` by default); returns its exit code.

    0: success. 1: failure while running. 2: wrong arguments. 130: interrupted.
    """
    try:
        code = (commands or app)(
            args=list(arguments) if arguments is not None else None, standalone_mode=True
        )
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except ShoalError as error:
        _print_error(error)
        return MISUSE if isinstance(error, _MISUSE_ERRORS) else FAILURE
    except BrokenPipeError:
        sys.stderr.close()
        return FAILURE
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _print_error(ShoalError(f"cannot write all output: {error.strerror}"))
            return FAILURE
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        _print_error(ShoalError(f"{error.strerror}: allow more, as with `ulimit -n 1024`"))
        return FAILURE
    return code if isinstance(code, int) else FAILURE if code else 0


def _print_error(error: ShoalError) -> None:
    line = Text("error: ", style="bold red").append(str(error), style="red")
    Console(stderr=True, soft_wrap=True, highlight=False).print(line)
