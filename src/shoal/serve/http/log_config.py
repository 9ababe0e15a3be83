"""The configuration of the server's log."""

import copy
import logging
import sys
import time
from typing import Any, TextIO

from uvicorn.config import LOGGING_CONFIG

from shoal.serve.http.access_log import ACCESS_LOGGER
from shoal.serve.options import LogLevel

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


class StandardStreamHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever ``sys.stdout`` or ``sys.stderr`` is at the time.

    While a server loads they are a progress display's, which would break lines at the terminal's width. A
    reader that is gone, and a stream that was closed before the start, are no errors: the server goes on
    without a log.
    """

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._name_of_stream = name

    @property
    def stream(self) -> TextIO | None:  # type: ignore[override]
        """Where it writes now; None: nowhere."""
        stream: TextIO | None = getattr(sys, self._name_of_stream)
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``."""
        if self.stream is not None:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Print what went wrong, unless nobody reads."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_config(level: LogLevel = "info") -> dict[str, Any]:
    """uvicorn's logging with this filter, times and our access log, as ``dictConfig`` takes it.

    level: the least that is logged, beside the access log.
    """
    config = copy.deepcopy(LOGGING_CONFIG)
    config["filters"] = {"once": {"()": OncePerMinute}}
    config["formatters"]["default"] |= {
        # uvicorn would ask standard output.
        "use_colors": sys.stderr is not None and sys.stderr.isatty(),
        "fmt": "%(asctime)s.%(msecs)03d+00:00 %(levelprefix)s %(message)s",
        "datefmt": "%Y-%m-%dT%H:%M:%S",
        ".": {"converter": time.gmtime},
    }
    config["formatters"]["access"] = {"format": "%(message)s"}
    errors = {"()": StandardStreamHandler, "name": "stderr", "formatter": "default"}
    config["handlers"] = {
        "default": errors | {"filters": ["once"]},
        "events": errors,
        "access": {"()": StandardStreamHandler, "name": "stdout", "formatter": "access"},
    }
    # What uvicorn tells of itself is no more than what we tell: it begins with warnings.
    uvicorn_level = "ERROR" if level == "error" else "WARNING"
    config["loggers"]["uvicorn"]["level"] = config["loggers"]["uvicorn.error"]["level"] = uvicorn_level
    config["loggers"]["shoal"] = {"level": level.upper()}
    config["loggers"][ACCESS_LOGGER] = {"handlers": ["access"], "level": "INFO", "propagate": False}
    # What is open, what becomes of engines and of their requests, what operators change, and the end. Each
    # unknown field of requests is told once anyway.
    events = ("http.exposure", "admin.operations", "launch", "unknown_fields")
    for name in ("shoal.cluster", *(f"shoal.serve.{event}" for event in events)):
        config["loggers"][name] = {"handlers": ["events"], "propagate": False}
    return config
