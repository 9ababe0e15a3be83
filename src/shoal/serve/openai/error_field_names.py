"""Translates field names in errors to those of the client: the engine and the APIs name some differently."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shoal.core import InvalidRequest

GRAMMAR = "grammar"
"""The engine's name of the grammar, which a body has in one of several fields."""

FieldNames = Mapping[str, str]
"""The client's names of fields, by their names in errors."""


@contextmanager
def client_field_names(names: FieldNames) -> Iterator[None]:
    """Translate field names in InvalidRequest errors; of a refused grammar: "FIELD cannot be used: ..."."""
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
    for name, client_name in names.items():
        # A name without "_" is also an ordinary word: replace it only at the beginning of the message.
        start = r"(?<![\w.'\"`])" if "_" in name else "^"
        message = re.sub(rf"{start}{name}(?!\w)", client_name, message)
    return message
