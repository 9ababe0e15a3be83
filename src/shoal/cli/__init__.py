"""The command line, ``shoal``: ``app.py`` lists the commands, and each has a file of its name.

This package holds the commands, their help and output, and the demo. The work is done by the other packages.
Importing this package, and ``shoal --help``, must stay fast: a command imports what it needs when it runs,
and torch is imported only where an engine is built.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

__all__ = ["exit_with", "main"]

_HELP = {"--help", "-h"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; ``arguments`` default to the process's own.

    SIGTERM ends a command as Ctrl-C does, so that it cleans up, unless the command handles it itself.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    starts_engines = words[:1] == ["serve"] and not _HELP & set(words)
    exit_with(partial(_run_with_early_node if starts_engines else _run, words))


def exit_with(command: Callable[[], int]) -> None:
    """Run ``command`` and exit with its code; SIGTERM and Ctrl-C let ``finally`` blocks run."""
    signal.signal(signal.SIGTERM, _terminated)
    _ensure_standard_error()
    try:
        code = command()
    except KeyboardInterrupt:  # during an import
        code = 128 + signal.SIGINT
    raise SystemExit(code)


def _ensure_standard_error() -> None:
    """Replace a closed standard error by the null device, also for child processes.

    ``sys.stderr`` would be None, and ``print(file=None)`` writes to standard output.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.set_inheritable(sys.stderr.fileno(), True)


def _run(words: Sequence[str]) -> int:
    from shoal.cli.app import run

    return run(words)


def _run_with_early_node(words: Sequence[str]) -> int:
    """Run a command that needs an engine; its process starts while the command reads the configuration."""
    from shoal.cluster.backends.node_start import drop_early_node, start_early_node

    try:
        start_early_node()
        return _run(words)
    finally:
        drop_early_node()


def _terminated(number: int, _: object) -> None:
    raise SystemExit(128 + number)
