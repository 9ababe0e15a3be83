"""From the bytes of a request to a checked body, and from what pydantic reports to one clear sentence."""

import asyncio
import difflib
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from shoal.core import InvalidRequest
from shoal.engine.info import EngineInfo
from shoal.engine.validation import check_prompt_length
from shoal.serve.bodies import FORMS, GenerationBody
from shoal.serve.errors import BodyTooLarge, WrongContentType, shorten
from shoal.serve.neutral import TOO_MANY_FIELDS, UNSUPPORTED
from shoal.serve.workers import Workers

# A body that is too large is read to the end and thrown away, so that the client gets to read the
# answer; but not if it is larger than the limit by this factor.
_PATIENCE = 8

# Names of fields are repeated in errors up to so many characters.
_LONGEST_NAME = 80
# Larger bodies are parsed in another process: it takes longer than streams should wait. Those of ordinary
# size need not wait there for the largest.
_SMALL_BYTES = 16 * 2**10
_LARGE_BYTES = 256 * 2**10
# No type that is JSON needs more.
_LONGEST_CONTENT_TYPE = 256

Body = TypeVar("Body", bound=GenerationBody)


async def parse_body(
    request: Request,
    kind: type[Body],
    max_bytes: int,
    info: EngineInfo,
    workers: Workers,
    turns: asyncio.Lock,
) -> Body:
    """The body of ``request``; raises InvalidRequest, BodyTooLarge or WrongContentType.

    turns: shared by all requests; bodies that are parsed here take them.
    """
    _check_content_type(request.headers.get("content-type"))
    raw = await _read(request, max_bytes)
    if len(raw) > _SMALL_BYTES:
        line = "bodies" if len(raw) <= _LARGE_BYTES else "large bodies"
        return await workers.run(line, f"a body of {len(raw)} bytes", read_body, raw, kind, info)
    async with turns:
        # Between two of the many bodies that may come at once, others get on with theirs.
        await asyncio.sleep(0)
        return read_body(raw, kind, info)


def read_body(raw: bytes, kind: type[Body], info: EngineInfo) -> Body:
    """What ``raw`` says; raises InvalidRequest for the first thing that is wrong with it.

    Lists of token ids that are too long for the service are refused here too, so that they need not be
    carried on.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error, raw, kind) from None
    limits = info.services.get(body.model)
    if limits is not None:
        for tokens in body.token_prompts():
            check_prompt_length(limits, body.model, len(tokens))
    return body


def _check_content_type(header: str | None) -> None:
    if header is None:
        # Web pages of others can send what has no type, but not JSON.
        raise WrongContentType("the request has no Content-Type; send Content-Type: application/json")
    if len(header) > _LONGEST_CONTENT_TYPE:
        raise WrongContentType("the Content-Type is too long; send Content-Type: application/json")
    media, *parameters = (part.strip().lower() for part in header.split(";"))
    charsets = [
        value.strip('"') for name, _, value in (p.partition("=") for p in parameters) if name == "charset"
    ]
    is_json = media == "application/json" or (media.startswith("application/") and media.endswith("+json"))
    if not is_json or any(charset not in ("utf-8", "utf8") for charset in charsets):
        raise WrongContentType(
            f"cannot read a body of type {header!r}; "
            "send JSON in UTF-8 with the header Content-Type: application/json"
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= max_bytes:
            body += piece
        elif size > max_bytes * _PATIENCE:
            break
        else:
            body.clear()
    if size > max_bytes:
        raise BodyTooLarge(f"the body is larger than {max_bytes} bytes, the most that this server reads")
    return bytes(body)


def _explain(error: ValidationError, raw: bytes, kind: type[BaseModel]) -> InvalidRequest:
    """One sentence about the first field that is wrong."""
    details = error.errors(include_url=False, include_input=False, include_context=True)
    if details[0]["type"] == "json_invalid":
        return InvalidRequest(
            f"the body is not valid JSON: {details[0]['ctx']['error']}", code="invalid_json"
        )
    if not details[0]["loc"]:
        if details[0]["type"] == TOO_MANY_FIELDS:
            return InvalidRequest(f"the body has {details[0]['msg']}")
        return InvalidRequest("the body must be a JSON object")
    # Several branches of a union may complain about one field: the deepest knows best.
    sent = from_json(raw)
    paths = [_path(sent, detail["loc"]) for detail in details]
    field = paths[0][0]
    deepest = max(
        (index for index, path in enumerate(paths) if path[0] == field),
        key=lambda index: (len(paths[index]), -index),
    )
    return _say(paths[deepest], details[deepest], kind)


def _path(sent: Any, location: Sequence[int | str]) -> list[int | str]:
    """``location`` without the names that pydantic gives the branches of unions."""
    path: list[int | str] = []
    for step in location:
        if isinstance(sent, dict) and isinstance(step, str):
            path.append(step)
            sent = sent.get(step)
        elif isinstance(sent, list) and isinstance(step, int) and step < len(sent):
            path.append(step)
            sent = sent[step]
    return path


def _say(path: list[int | str], detail: ErrorDetails, kind: type[BaseModel]) -> InvalidRequest:
    path = [shorten(step, _LONGEST_NAME) if isinstance(step, str) else step for step in path]
    names = [step for step in path if isinstance(step, str)]
    for depth, step in enumerate(path):
        if step in FORMS and detail["type"] != "missing":
            where = ".".join(map(str, path[: depth + 1]))
            return InvalidRequest(f"{where} {FORMS[str(step)]}", param=where)
    where = ".".join(map(str, path))
    if detail["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {where!r}{_hint(names, kind)}", param=where)
    if detail["type"] == "missing":
        return InvalidRequest(f"{where} is missing", param=where)
    if names[-1] in UNSUPPORTED or names[0] in UNSUPPORTED:
        return InvalidRequest(f"{where} is not supported by this server; leave it out", param=where)
    problem = detail["msg"].replace(" after validation", "")
    return InvalidRequest(f"{where}: {problem[0].lower()}{problem[1:]}", param=where)


def _hint(names: list[str], kind: type[BaseModel]) -> str:
    inner: type[BaseModel] | None = kind
    for name in names[:-1]:
        inner = inner and _model_of(inner.model_fields[name].annotation)
    if inner is None:
        return ""
    near = difflib.get_close_matches(names[-1], inner.model_fields, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "" if inner is kind else f"; possible here: {', '.join(inner.model_fields)}"


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model among the branches of a field's type, if there is one."""
    models = [kind for kind in get_args(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if models else None
