"""Filters for the server's log."""

import copy
import logging
import time
from typing import Any

from uvicorn.config import LOGGING_CONFIG

_INTERVAL_S = 60
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


class OncePerMinute(logging.Filter):
    """Passes each kind of warning once a minute; the next one tells how many were left out.

    Clients could cause any number of warnings. Errors always pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[
            str, tuple[float, int]
        ] = {}  # by template: when it passed, how many were left out since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is written."""
        if record.levelno != logging.WARNING:
            return True
        kind = str(record.msg)
        now_s = time.monotonic()
        passed_s, num_skipped = self._seen.get(kind, (-_INTERVAL_S, 0))
        if now_s - passed_s < _INTERVAL_S:
            self._seen[kind] = passed_s, num_skipped + 1
            return False
        self._seen[kind] = now_s, 0
        if num_skipped:
            record.msg, record.args = f"{record.getMessage()} (and {num_skipped} more times)", ()
        return True


class EscapeControls(logging.Filter):
    """Escapes control characters, as ``\\x1b``: a client could use them to control a terminal."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true."""
        if isinstance(record.args, tuple):
            record.args = tuple(
                argument.translate(_CONTROLS) if isinstance(argument, str) else argument
                for argument in record.args
            )
        return True


def log_config() -> dict[str, Any]:
    """uvicorn's logging with these filters, as ``logging.config.dictConfig`` takes it."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["filters"] = {"once": {"()": OncePerMinute}, "escape": {"()": EscapeControls}}
    config["handlers"]["default"]["filters"] = ["once"]
    config["handlers"]["access"]["filters"] = ["escape"]
    return config
