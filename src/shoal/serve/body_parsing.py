"""Parses request bodies, and turns the errors of pydantic into a clear sentence."""

import asyncio
import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from shoal.core import InvalidRequest
from shoal.frontend.validation import Limits, check_prompt_length
from shoal.serve.cpu_workers import Workers
from shoal.serve.errors import BodyTooLarge, WrongContentType
from shoal.serve.http.error_responses import OLLAMA_PREFIX, shorten
from shoal.serve.ollama.request_bodies import OllamaChatBody, OllamaGenerateBody, Options
from shoal.serve.openai.nested_objects import Goals, StreamOptions
from shoal.serve.openai.request_bodies import FORMS, ChatBody, CompletionBody, ServiceBody
from shoal.serve.openai.structured_outputs import StructuredOutputs
from shoal.serve.responses_api.request_body import ResponsesBody
from shoal.serve.strict_model import TOO_MANY_FIELDS, UNION_TAG, StrictModel
from shoal.serve.unknown_fields import MAX_NAME_CHARACTERS, IgnoredFields, Reading, meant_name

# A body that is too large is read to its end and discarded, so that the client can read the error; but not if
# it is larger than the limit by this factor.
_MAX_DISCARD_FACTOR = 8

# Larger bodies are parsed in another process, because streams should not wait so long. Large ones have a
# queue of their own, so that others need not wait for them.
_SMALL_BYTES = 16 * 2**10
_LARGE_BYTES = 256 * 2**10
# Bodies that ask for text. What one of them has is not ignored in another.
_ROUTES: Mapping[str, type[StrictModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/api/generate": OllamaGenerateBody,
    "/api/chat": OllamaChatBody,
}
_SAYING_MORE: Sequence[type[StrictModel]] = (
    *_ROUTES.values(),
    Options,
    StreamOptions,
    Goals,
    StructuredOutputs,
)
_ELSEWHERE = frozenset(name for kind in _SAYING_MORE for name in kind.named_with_effect()) - {
    "keep_alive",
    "metadata",
    "model",
    "usage",
}
"""Their fields, without those that do not bear on the output."""
# Enough for every content type of JSON.
_MAX_CONTENT_TYPE_CHARACTERS = 256

Body = TypeVar("Body", bound=ServiceBody)


async def parse_body(
    request: Request,
    body_type: type[Body],
    max_bytes: int,
    info: Limits,
    workers: Workers,
    parse_lock: asyncio.Lock,
    ignored: IgnoredFields | None,
) -> Body:
    """The body of ``request``; raises InvalidRequest, BodyTooLarge or WrongContentType.

    parse_lock: shared by all requests; held while a body is parsed in this process. ignored: takes note of
    unknown fields that are ignored; None: all are refused.
    """
    raw = await read_raw(request, max_bytes)
    return await parse_bytes(raw, body_type, info, workers, parse_lock, ignored)


async def parse_bytes(
    raw: bytes,
    body_type: type[Body],
    info: Limits,
    workers: Workers,
    parse_lock: asyncio.Lock,
    ignored: IgnoredFields | None,
) -> Body:
    """Parse ``raw`` where it delays nobody; raises InvalidRequest."""
    refuses = ignored is None
    read: tuple[Body, list[str]]
    if len(raw) > _SMALL_BYTES:
        queue = "bodies" if len(raw) <= _LARGE_BYTES else "large bodies"
        task = f"a body of {len(raw)} bytes"
        read = await workers.run(queue, task, read_body, raw, body_type, info, refuses)
    else:
        async with parse_lock:
            # Many bodies may arrive at once: other tasks run between two of them.
            await asyncio.sleep(0)
            read = read_body(raw, body_type, info, refuses)
    body, names = read
    if ignored is not None:
        ignored.note(names)
    return body


def read_body(raw: bytes, body_type: type[Body], info: Limits, refuses: bool) -> tuple[Body, list[str]]:
    """What ``raw`` contains, and the fields that were ignored; raises InvalidRequest for its first error.

    refuses: unknown fields are an error. Lists of token ids that are too long for the service are rejected
    here already, so that a worker process need not send them back.
    """
    reading = Reading(refuses, _ELSEWHERE)
    try:
        body = body_type.model_validate_json(raw, context=reading)
    except ValidationError as error:
        raise _explain(error, raw, body_type, reading.renamed) from None
    body.name_fields(reading.renamed)
    limits = info.services.get(body.model)
    if limits is not None:
        for tokens in body.token_prompts():
            check_prompt_length(limits, body.model, len(tokens))
    places = _places(body_type)
    return body, sorted(places[kind] + name for kind, name in reading.ignored)


def _check_content_type(request: Request) -> None:
    """Raise WrongContentType unless the body is declared to be JSON, or may be taken for it.

    Pages of other sites can have a browser send any body without asking the server first, but not one that is
    declared to be JSON. Ollama reads bodies whatever their type, and its clients declare none, or as ``curl
    -d`` does a form: so they are read where no page sent them.
    """
    problem = _not_json(request.headers.get("content-type"))
    if problem is None:
        return
    if not request.url.path.startswith(OLLAMA_PREFIX):
        raise WrongContentType(
            f"{problem}; send JSON in UTF-8 with the header Content-Type: application/json"
        )
    if _is_from_page(request):
        raise WrongContentType(
            f"{problem}, and comes from a web page (Origin, Sec-Fetch-Site); "
            "pages must send JSON in UTF-8 with the header Content-Type: application/json"
        )


def _is_from_page(request: Request) -> bool:
    """Whether a page may have sent it that this server did not send to the browser."""
    site = request.headers.get("sec-fetch-site", "none").strip().lower()
    return "origin" in request.headers or site not in ("none", "same-origin")


def _not_json(header: str | None) -> str | None:
    """Why a body with this content type is not JSON; None: it is."""
    if header is None:
        return "the request has no Content-Type"
    if len(header) > _MAX_CONTENT_TYPE_CHARACTERS:
        return "the Content-Type is too long"
    media, *parameters = (part.strip().lower() for part in header.split(";"))
    charsets = [
        value.strip('"') for name, _, value in (p.partition("=") for p in parameters) if name == "charset"
    ]
    is_json = media == "application/json" or (media.startswith("application/") and media.endswith("+json"))
    if not is_json or any(charset not in ("utf-8", "utf8") for charset in charsets):
        return f"cannot read a body of type {header!r}"
    return None


async def read_raw(request: Request, max_bytes: int) -> bytes:
    """The body of ``request``, not parsed; raises BodyTooLarge or WrongContentType."""
    _check_content_type(request)
    body = bytearray()
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= max_bytes:
            body += piece
        elif size > max_bytes * _MAX_DISCARD_FACTOR:
            break
        else:
            body.clear()
    if size > max_bytes:
        raise BodyTooLarge(f"the body is larger than {max_bytes} bytes, the most that this server reads")
    return bytes(body)


def _explain(
    error: ValidationError, raw: bytes, body_type: type[ServiceBody], renamed: Mapping[str, str]
) -> InvalidRequest:
    """A sentence about the first field that is wrong.

    renamed: what the client called fields, by our names.
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
    # Several branches of a union may report an error for a field; the deepest path says most.
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
    """``location`` without the names that pydantic adds for branches of unions."""
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
    shown = [renamed.get(str(path[0]), str(path[0])), *map(str, path[1:])]
    names = [step for step in path if isinstance(step, str)]
    is_unknown = detail["type"] == "extra_forbidden"
    for depth in range(len(path)) if detail["type"] != "missing" else ():
        if (form := _form(path, depth, body_type, is_unknown)) is not None:
            where = ".".join(shown[: depth + 1])
            return InvalidRequest(f"{where} {form}", param=where)
    where = ".".join(shown)
    kinds = _kinds_along(names, body_type)
    if is_unknown:
        return InvalidRequest(f"unknown field {where!r}{_hint(names[-1], kinds[-1], body_type)}", param=where)
    if detail["type"] == "missing":
        return InvalidRequest(f"{where} is missing", param=where)
    for name, kind in zip(reversed(names), reversed(kinds), strict=True):
        for instead in (one.unsupported().get(name) for one in kind):
            if instead is not None:
                return InvalidRequest(f"{where} is not supported by this server; {instead}", param=where)
    problem = detail["msg"].replace(" after validation", "")
    return InvalidRequest(f"{where}: {problem[0].lower()}{problem[1:]}", param=where)


def _form(path: list[int | str], depth: int, body_type: type[ServiceBody], is_unknown: bool) -> str | None:
    """What is said of any error at or below ``path[depth]``, if something is.

    is_unknown: there is no field at the end of the path.
    """
    step = str(path[depth])
    if depth == 0 and step in body_type.top_forms:
        return body_type.top_forms[step] if len(path) == 1 else None
    if is_unknown and depth == len(path) - 1:
        return None
    return body_type.forms.get(step) or FORMS.get(step)


def _hint(name: str, kinds: Sequence[type[StrictModel]], body_type: type[ServiceBody]) -> str:
    """What an unknown field of one of ``kinds`` may be meant for."""
    for kind in kinds:
        own = kind.named_with_effect()
        if (meant := meant_name(name, kind, _ELSEWHERE)) is not None and meant not in own:
            return _hint_elsewhere(meant, kind)
        near = meant or next(iter(difflib.get_close_matches(name, own, n=1)), None)
        if near is not None:
            return f"; did you mean {near!r}?"
    if not kinds or kinds[0] is body_type:
        return ""
    fields = kinds[0].model_fields.items()
    return f"; possible here: {', '.join(field.alias or name for name, field in fields)}"


def _hint_elsewhere(name: str, kind: type[StrictModel]) -> str:
    """Where the field ``name`` is, that is not one of ``kind``."""
    for own, field in kind.model_fields.items():
        if any(name in inner.named_with_effect() for inner in _kinds_in(field.annotation)):
            return f"; did you mean '{own}.{name}'?"
    route = next((route for route, other in _ROUTES.items() if name in other.known_names()), None)
    return "" if route is None else f"; {name!r} is a field of {route}"


def _kinds_along(names: Sequence[str], body_type: type[ServiceBody]) -> list[Sequence[type[StrictModel]]]:
    """For each name of a path the types of objects that may have it."""
    along: list[Sequence[type[StrictModel]]] = [[body_type]]
    for name in names[:-1]:
        fields = [kind.model_fields[name] for kind in along[-1] if name in kind.model_fields]
        along.append([inner for field in fields for inner in _kinds_in(field.annotation)])
    return along


def _kinds_in(annotation: Any) -> Iterator[type[StrictModel]]:
    """The types of objects in the type of a field."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        yield annotation
    else:
        for branch in get_args(annotation):
            yield from _kinds_in(branch)


@cache
def _places(body_type: type[ServiceBody]) -> Mapping[type, str]:
    """Where in a body its types of objects are: the beginning of the names of their fields."""
    places: dict[type, str] = {body_type: ""}
    open_kinds: list[type[StrictModel]] = [body_type]
    for kind in open_kinds:  # grows meanwhile
        for name, field in kind.model_fields.items():
            for inner in _kinds_in(field.annotation):
                if inner not in places:
                    places[inner] = f"{places[kind]}{field.alias or name}."
                    open_kinds.append(inner)
    return places
