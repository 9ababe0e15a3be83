"""Parses request bodies, and turns the errors of pydantic into a clear sentence."""

import asyncio
import difflib
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from shoal.core import InvalidRequest
from shoal.engine.validation import Limits, check_prompt_length
from shoal.serve.bodies import FORMS, ServiceBody
from shoal.serve.errors import OLLAMA_PREFIX, BodyTooLarge, WrongContentType, shorten
from shoal.serve.neutral import TOO_MANY_FIELDS, UNION_TAG, UNSUPPORTED
from shoal.serve.workers import Workers

# A body that is too large is read to its end and discarded, so that the client can read the error; but not if
# it is larger than the limit by this factor.
_MAX_DISCARD_FACTOR = 8

# Errors quote names of fields up to this many characters.
_MAX_NAME_CHARACTERS = 80
# Larger bodies are parsed in another process, because streams should not wait so long. Large ones have a
# queue of their own, so that others need not wait for them.
_SMALL_BYTES = 16 * 2**10
_LARGE_BYTES = 256 * 2**10
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
) -> Body:
    """The body of ``request``; raises InvalidRequest, BodyTooLarge or WrongContentType.

    parse_lock: shared by all requests; held while a body is parsed in this process.
    """
    return await parse_bytes(await read_raw(request, max_bytes), body_type, info, workers, parse_lock)


async def parse_bytes(
    raw: bytes, body_type: type[Body], info: Limits, workers: Workers, parse_lock: asyncio.Lock
) -> Body:
    """Parse ``raw`` where it delays nobody; raises InvalidRequest."""
    if len(raw) > _SMALL_BYTES:
        queue = "bodies" if len(raw) <= _LARGE_BYTES else "large bodies"
        return await workers.run(queue, f"a body of {len(raw)} bytes", read_body, raw, body_type, info)
    async with parse_lock:
        # Many bodies may arrive at once: other tasks run between two of them.
        await asyncio.sleep(0)
        return read_body(raw, body_type, info)


def read_body(raw: bytes, body_type: type[Body], info: Limits) -> Body:
    """Parse ``raw``; raises InvalidRequest for its first error.

    Lists of token ids that are too long for the service are rejected here already, so that a worker process
    need not send them back.
    """
    try:
        body = body_type.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error, raw, body_type) from None
    limits = info.services.get(body.model)
    if limits is not None:
        for tokens in body.token_prompts():
            check_prompt_length(limits, body.model, len(tokens))
    return body


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


def _explain(error: ValidationError, raw: bytes, body_type: type[ServiceBody]) -> InvalidRequest:
    """A sentence about the first field that is wrong."""
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
    paths = [_path(sent, detail["loc"]) for detail in details]
    field = paths[0][0]
    deepest = max(
        (index for index, path in enumerate(paths) if path[0] == field),
        key=lambda index: (len(paths[index]), -index),
    )
    return _describe(paths[deepest], details[deepest], body_type)


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


def _describe(path: list[int | str], detail: ErrorDetails, body_type: type[ServiceBody]) -> InvalidRequest:
    path = [shorten(step, _MAX_NAME_CHARACTERS) if isinstance(step, str) else step for step in path]
    names = [step for step in path if isinstance(step, str)]
    is_unknown = detail["type"] == "extra_forbidden"
    for depth in range(len(path)) if detail["type"] != "missing" else ():
        if (form := _form(path, depth, body_type, is_unknown)) is not None:
            where = ".".join(map(str, path[: depth + 1]))
            return InvalidRequest(f"{where} {form}", param=where)
    where = ".".join(map(str, path))
    if is_unknown:
        return InvalidRequest(f"unknown field {where!r}{_hint(names, body_type)}", param=where)
    if detail["type"] == "missing":
        return InvalidRequest(f"{where} is missing", param=where)
    unsupported = UNSUPPORTED | body_type.unsupported()
    instead = unsupported.get(names[-1]) or unsupported.get(names[0])
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


def _hint(names: list[str], body_type: type[BaseModel]) -> str:
    inner: type[BaseModel] | None = body_type
    for name in names[:-1]:
        inner = inner and _model_of(inner.model_fields[name].annotation)
    if inner is None:
        return ""
    near = difflib.get_close_matches(names[-1], inner.model_fields, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "" if inner is body_type else f"; possible here: {', '.join(inner.model_fields)}"


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model among the branches of a field's type, if any."""
    branches = get_args(annotation)
    models = [branch for branch in branches if isinstance(branch, type) and issubclass(branch, BaseModel)]
    return models[0] if models else None
