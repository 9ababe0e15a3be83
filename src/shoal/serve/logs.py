"""The configuration of the server's log."""

import copy
import logging
import time
from typing import Any

from uvicorn.config import LOGGING_CONFIG

from shoal.serve.access_log import ACCESS_LOGGER

_INTERVAL_S = 60


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


def log_config() -> dict[str, Any]:
    """uvicorn's logging with this filter and our access log, as ``logging.config.dictConfig`` takes it."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["filters"] = {"once": {"()": OncePerMinute}}
    config["handlers"]["default"]["filters"] = ["once"]
    config["formatters"]["access"] = {"format": "%(message)s"}
    config["loggers"][ACCESS_LOGGER] = {"handlers": ["access"], "level": "INFO", "propagate": False}
    # What becomes of engines and of the requests that they had, and what operators change.
    for name in ("shoal.cluster", "shoal.serve.operations"):
        config["loggers"][name] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return config
