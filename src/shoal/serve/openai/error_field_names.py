"""Errors that call fields as the client did: the engine, OpenAI's API and Ollama's name some differently."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shoal.core import InvalidRequest

GRAMMAR = "grammar"
"""The engine's name of what a body has in one of several fields."""

FieldNames = Mapping[str, str]
"""What the client calls fields, by the names that errors have for them."""


@contextmanager
def client_field_names(names: FieldNames) -> Iterator[None]:
    """Name fields in errors as the client does; why a grammar is refused goes behind its field's name."""
    try:
        yield
    except InvalidRequest as error:
        field, dot, inner = (error.param or "").partition(".")
        param = names.get(field, field) + dot + inner or None
        if field == GRAMMAR and GRAMMAR in names:
            message = f"{names[GRAMMAR]} cannot be used: {error}"
        else:
            message = _renamed(str(error), names)
        raise InvalidRequest(message, param, error.code) from None


def _renamed(message: str, names: FieldNames) -> str:
    """``message`` with the client's names."""
    for name, shown in names.items():
        # Others are ordinary words, unless errors begin with them.
        place = r"(?<![\w.'\"`])" if "_" in name else "^"
        message = re.sub(rf"{place}{name}(?!\w)", shown, message)
    return message
