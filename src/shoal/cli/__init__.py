"""The command line: ``shoal serve | generate | static | chat | models | demo | profile | version``.

This room holds the commands, their help and output, and the demo. The work itself is done by the rooms below.
Importing this package, and ``shoal --help``, must stay quick: a command imports what it needs when it runs,
and torch is imported only where an engine is built.
"""

import signal
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; ``arguments`` default to the process's own.

    SIGTERM ends a command as Ctrl-C does, so that it cleans up, unless the command handles it itself.
    """
    signal.signal(signal.SIGTERM, _terminated)
    try:
        from shoal.cli.app import run

        code = run(arguments)
    except KeyboardInterrupt:  # during the import
        code = 128 + signal.SIGINT
    raise SystemExit(code)


def _terminated(number: int, _: object) -> None:
    raise SystemExit(128 + number)
