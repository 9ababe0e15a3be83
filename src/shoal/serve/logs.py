"""What is written to the server's log, and how often."""

import copy
import logging
import time
from typing import Any

from uvicorn.config import LOGGING_CONFIG

_AGAIN_S = 60
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


class OncePerMinute(logging.Filter):
    """Lets each kind of warning through once a minute; the next one tells how many there were meanwhile.

    Clients can bring about as many as they like. Errors always pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}  # by template: when it passed, how often since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is written."""
        if record.levelno != logging.WARNING:
            return True
        kind = str(record.msg)
        now_s = time.monotonic()
        passed_s, missed = self._seen.get(kind, (-_AGAIN_S, 0))
        if now_s - passed_s < _AGAIN_S:
            self._seen[kind] = passed_s, missed + 1
            return False
        self._seen[kind] = now_s, 0
        if missed:
            record.msg, record.args = f"{record.getMessage()} (and {missed} more times)", ()
        return True


class EscapeControls(logging.Filter):
    """Writes control characters, with which a client could steer a terminal, as ``\\x1b``."""

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
