"""Routes that are read."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI


def add_get(app: FastAPI, path: str, endpoint: Callable[..., Any], **documented: Any) -> None:
    """Route GET and HEAD; the web server leaves out the body for HEAD."""
    app.get(path, **documented)(endpoint)
    app.head(path, include_in_schema=False)(endpoint)
