"""Error messages for invalid bodies: from pydantic's errors to one sentence, with "did you mean" hints."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from shoal.core import InvalidRequest
from shoal.serve.anthropic.request_body import MessagesBody
from shoal.serve.http.error_responses import shorten
from shoal.serve.ollama.request_bodies import OllamaChatBody, OllamaGenerateBody, Options
from shoal.serve.openai.nested_objects import Goals, StreamOptions
from shoal.serve.openai.request_bodies import FIELD_ERRORS, ChatBody, CompletionBody, ServiceBody
from shoal.serve.openai.structured_outputs import StructuredOutputs
from shoal.serve.responses_api.request_body import ResponsesBody
from shoal.serve.strict_model import TOO_MANY_FIELDS, UNION_TAG, StrictModel
from shoal.serve.unknown_fields import MAX_NAME_CHARACTERS, intended_name

# Bodies that generate text. A field of one of them is not ignored in another.
_ROUTES: Mapping[str, type[StrictModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/api/generate": OllamaGenerateBody,
    "/api/chat": OllamaChatBody,
}
_GENERATION_TYPES: Sequence[type[StrictModel]] = (
    *_ROUTES.values(),
    Options,
    StreamOptions,
    Goals,
    StructuredOutputs,
)
OUTPUT_FIELDS = frozenset(name for kind in _GENERATION_TYPES for name in kind.effective_names()) - {
    "keep_alive",
    "metadata",
    "model",
    "usage",
}
"""Names of all fields that affect an output, in any body."""


def explain_validation_error(
    error: ValidationError, raw: bytes, body_type: type[ServiceBody], renamed: Mapping[str, str]
) -> InvalidRequest:
    """A sentence about the first invalid field.

    renamed: the client's names of fields, by our names.
    """
    details = error.errors(include_url=False, include_input=False, include_context=True)
    if details[0]["type"] == "json_invalid":
        return InvalidRequest(
            f"the body is not valid JSON: {details[0]['ctx']['error']}", code="invalid_json"
        )
    if not details[0]["loc"]:
        if details[0]["type"] == TOO_MANY_FIELDS:
            return InvalidRequest(f"the body has {details[0]['msg']}")
        return InvalidRequest("the body must be a JSON object")
    # Several branches of a union may report an error for a field; the deepest path is the most specific.
    sent = from_json(raw)
    if renamed:
        sent |= {ours: sent[theirs] for ours, theirs in renamed.items()}
    paths = [_path(sent, detail["loc"]) for detail in details]
    field = paths[0][0]
    deepest = max(
        (index for index, path in enumerate(paths) if path[0] == field),
        key=lambda index: (len(paths[index]), -index),
    )
    return _describe(paths[deepest], details[deepest], body_type, renamed)


def _path(sent: Any, location: Sequence[int | str]) -> list[int | str]:
    """The path of a field in ``sent``: ``location`` without pydantic's names of union branches."""
    path: list[int | str] = []
    for step in location:
        if isinstance(sent, dict) and isinstance(step, str):
            if step.startswith(UNION_TAG) and step not in sent:
                continue
            path.append(step)
            sent = sent.get(step)
        elif isinstance(sent, list) and isinstance(step, int) and step < len(sent):
            path.append(step)
            sent = sent[step]
    return path


def _describe(
    path: list[int | str], detail: ErrorDetails, body_type: type[ServiceBody], renamed: Mapping[str, str]
) -> InvalidRequest:
    path = [shorten(step, MAX_NAME_CHARACTERS) if isinstance(step, str) else step for step in path]
    sent_path = [renamed.get(str(path[0]), str(path[0])), *map(str, path[1:])]
    names = [step for step in path if isinstance(step, str)]
    is_unknown = detail["type"] == "extra_forbidden"
    for depth in range(len(path)) if detail["type"] != "missing" else ():
        if (fixed := _fixed_error(path, depth, body_type, is_unknown)) is not None:
            where = ".".join(sent_path[: depth + 1])
            return InvalidRequest(f"{where} {fixed}", param=where)
    where = ".".join(sent_path)
    kinds = _types_along(names, body_type)
    if is_unknown:
        return InvalidRequest(f"unknown field {where!r}{_hint(names[-1], kinds[-1], body_type)}", param=where)
    if detail["type"] == "missing":
        return InvalidRequest(f"{where} is missing", param=where)
    for name, kind in zip(reversed(names), reversed(kinds), strict=True):
        for alternative in (one.unsupported().get(name) for one in kind):
            if alternative is not None:
                return InvalidRequest(f"{where} is not supported by this server; {alternative}", param=where)
    problem = detail["msg"].replace(" after validation", "")
    return InvalidRequest(f"{where}: {problem[0].lower()}{problem[1:]}", param=where)


def _fixed_error(
    path: list[int | str], depth: int, body_type: type[ServiceBody], is_unknown: bool
) -> str | None:
    """The fixed text for errors at or below ``path[depth]``; None: there is none.

    is_unknown: the path ends at an unknown field.
    """
    step = str(path[depth])
    if depth == 0 and step in body_type.top_level_errors:
        return body_type.top_level_errors[step] if len(path) == 1 else None
    if is_unknown and depth == len(path) - 1:
        return None
    return body_type.field_errors.get(step) or FIELD_ERRORS.get(step)


def _hint(name: str, kinds: Sequence[type[StrictModel]], body_type: type[ServiceBody]) -> str:
    """A hint for an unknown field of one of ``kinds``: a similar name, the right place, or known fields."""
    for kind in kinds:
        own_names = kind.effective_names()
        if (intended := intended_name(name, kind, OUTPUT_FIELDS)) is not None and intended not in own_names:
            return _hint_other_place(intended, kind)
        suggestion = intended or next(iter(difflib.get_close_matches(name, own_names, n=1)), None)
        if suggestion is not None:
            return f"; did you mean {suggestion!r}?"
    if not kinds or kinds[0] is body_type:
        return ""
    fields = kinds[0].model_fields.items()
    return f"; possible here: {', '.join(field.alias or name for name, field in fields)}"


def _hint_other_place(name: str, kind: type[StrictModel]) -> str:
    """A hint where the field ``name`` belongs, which ``kind`` does not have."""
    for field_name, field in kind.model_fields.items():
        if any(name in inner.effective_names() for inner in object_types(field.annotation)):
            return f"; did you mean '{field_name}.{name}'?"
    route = next((route for route, other in _ROUTES.items() if name in other.known_names()), None)
    return "" if route is None else f"; {name!r} is a field of {route}"


def _types_along(names: Sequence[str], body_type: type[ServiceBody]) -> list[Sequence[type[StrictModel]]]:
    """For each name of a path, the types of objects that may have it."""
    along: list[Sequence[type[StrictModel]]] = [[body_type]]
    for name in names[:-1]:
        fields = [kind.model_fields[name] for kind in along[-1] if name in kind.model_fields]
        along.append([inner for field in fields for inner in object_types(field.annotation)])
    return along


def object_types(annotation: Any) -> Iterator[type[StrictModel]]:
    """The types of JSON objects in the annotation of a field."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        yield annotation
    else:
        for branch in get_args(annotation):
            yield from object_types(branch)
