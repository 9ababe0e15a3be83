"""Logging configuration: levels, formats, access log, and rate limiting of repeated warnings."""

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
    """Passes each kind of warning once a minute; the next one says how many were dropped.

    Clients could cause any number of warnings. Errors always pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[
            str, tuple[float, int]
        ] = {}  # by template: when it passed, how many were dropped since

    def filter(self, record: logging.LogRecord) -> bool:
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
    """Writes to the current ``sys.stdout`` or ``sys.stderr``.

    While a server loads, a progress display replaces them. A closed pipe, and a stream that was closed before
    the start, are no errors: the server continues without a log.
    """

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._stream_name = name

    @property
    def stream(self) -> TextIO | None:  # type: ignore[override]
        """The current stream; None: it is closed."""
        stream: TextIO | None = getattr(sys, self._stream_name)
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Print the error, unless the stream is closed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_config(level: LogLevel = "info") -> dict[str, Any]:
    """uvicorn's logging with rate limiting, times and our access log, for ``dictConfig``.

    level: of all loggers but the access log.
    """
    config = copy.deepcopy(LOGGING_CONFIG)
    config["filters"] = {"once": {"()": OncePerMinute}}
    config["formatters"]["default"] |= {
        # uvicorn checks standard output instead.
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
    # uvicorn's own information duplicates ours.
    uvicorn_level = "ERROR" if level == "error" else "WARNING"
    config["loggers"]["uvicorn"]["level"] = config["loggers"]["uvicorn.error"]["level"] = uvicorn_level
    config["loggers"]["shoal"] = {"level": level.upper()}
    config["loggers"][ACCESS_LOGGER] = {"handlers": ["access"], "level": "INFO", "propagate": False}
    # Not rate limited: exposure, engines and their requests, operators' changes, the shutdown. Each unknown
    # field is logged only once anyway.
    events = ("http.exposure", "admin.operations", "launch", "unknown_fields")
    for name in ("shoal.cluster", *(f"shoal.serve.{event}" for event in events)):
        config["loggers"][name] = {"handlers": ["events"], "propagate": False}
    return config
