"""Reads and parses request bodies: size limit, content type, and large bodies in worker processes."""

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from shoal.frontend.validation import Limits
from shoal.serve.body_errors import OUTPUT_FIELDS, explain_validation_error, object_types
from shoal.serve.cpu_workers import Workers
from shoal.serve.errors import BodyTooLarge, UnsupportedContentType
from shoal.serve.http.error_responses import OLLAMA_PREFIX
from shoal.serve.openai.request_bodies import ServiceBody
from shoal.serve.strict_model import StrictModel
from shoal.serve.unknown_fields import IgnoredFieldLog, ParsingContext

# A body that is too large is read and discarded, so that the client can read the error, up to this multiple
# of the limit.
_MAX_DISCARD_FACTOR = 8

# Larger bodies are parsed in a worker process, so that streams do not stall. Bodies beyond the second size
# have a queue of their own, so that smaller ones do not wait for them.
_SMALL_BYTES = 16 * 2**10
_LARGE_BYTES = 256 * 2**10
# Long enough for any JSON content type.
_MAX_CONTENT_TYPE_CHARACTERS = 256

Body = TypeVar("Body", bound=ServiceBody)


async def parse_body(
    request: Request,
    body_type: type[Body],
    max_bytes: int,
    info: Limits,
    workers: Workers,
    parse_lock: asyncio.Lock,
    ignored: IgnoredFieldLog | None,
) -> Body:
    """The body of ``request``; raises InvalidRequest, BodyTooLarge or UnsupportedContentType.

    parse_lock: shared by all requests; held while a body is parsed in this process. ignored: logs ignored
    fields; None: unknown fields are refused.
    """
    raw = await read_raw(request, max_bytes)
    return await parse_bytes(raw, body_type, info, workers, parse_lock, ignored)


async def parse_bytes(
    raw: bytes,
    body_type: type[Body],
    info: Limits,
    workers: Workers,
    parse_lock: asyncio.Lock,
    ignored: IgnoredFieldLog | None,
) -> Body:
    """Parse ``raw``, in a worker process if it is large; raises InvalidRequest."""
    refuses = ignored is None
    read: tuple[Body, list[str]]
    if len(raw) > _SMALL_BYTES:
        queue = "bodies" if len(raw) <= _LARGE_BYTES else "large bodies"
        task = f"a body of {len(raw)} bytes"
        read = await workers.run(queue, task, read_body, raw, body_type, info, refuses)
    else:
        async with parse_lock:
            # Many bodies may arrive at once: let other tasks run between two of them.
            await asyncio.sleep(0)
            read = read_body(raw, body_type, info, refuses)
    body, names = read
    if ignored is not None:
        ignored.log(names)
    return body


def read_body(raw: bytes, body_type: type[Body], info: Limits, refuses: bool) -> tuple[Body, list[str]]:
    """The parsed body, and the names of its ignored fields; raises InvalidRequest for its first error.

    refuses: unknown fields are an error. Token prompts that are too long for the service are rejected here,
    so that a worker process need not send them back.
    """
    context = ParsingContext(refuses, OUTPUT_FIELDS)
    try:
        body = body_type.model_validate_json(raw, context=context)
    except ValidationError as error:
        raise explain_validation_error(error, raw, body_type, context.renamed) from None
    body.set_sent_names(context.renamed)
    limits = info.services.get(body.model)
    if limits is not None:
        for tokens in body.token_prompts():
            limits.lengths(body.model).check_prompt(len(tokens))
    prefixes = _name_prefixes(body_type)
    return body, sorted(prefixes[kind] + name for kind, name in context.ignored)


def _check_content_type(request: Request) -> None:
    """Raise UnsupportedContentType unless the body is declared to be JSON, or Ollama's clients sent it.

    This protects against cross-site requests: a page of another site can make a browser send any body
    without a preflight request, but not one that is declared to be JSON. Ollama ignores content types, and
    its clients send none, or that of a form (``curl -d``): these are accepted unless a page sent them.
    """
    problem = _content_type_problem(request.headers.get("content-type"))
    if problem is None:
        return
    if not request.url.path.startswith(OLLAMA_PREFIX):
        raise UnsupportedContentType(
            f"{problem}; send JSON in UTF-8 with the header Content-Type: application/json"
        )
    if _is_from_page(request):
        raise UnsupportedContentType(
            f"{problem}, and comes from a web page (Origin, Sec-Fetch-Site); "
            "pages must send JSON in UTF-8 with the header Content-Type: application/json"
        )


def _is_from_page(request: Request) -> bool:
    """Whether a web page of another site may have sent the request."""
    site = request.headers.get("sec-fetch-site", "none").strip().lower()
    return "origin" in request.headers or site not in ("none", "same-origin")


def _content_type_problem(header: str | None) -> str | None:
    """Why a body with this content type is not JSON in UTF-8; None: it is."""
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
    """The unparsed body of ``request``; raises BodyTooLarge or UnsupportedContentType."""
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


@cache
def _name_prefixes(body_type: type[ServiceBody]) -> Mapping[type, str]:
    """The path of each type of objects in a body, such as ``"stream_options."``."""
    prefixes: dict[type, str] = {body_type: ""}
    to_visit: list[type[StrictModel]] = [body_type]
    for kind in to_visit:  # grows in the loop
        for name, field in kind.model_fields.items():
            for inner in object_types(field.annotation):
                if inner not in prefixes:
                    prefixes[inner] = f"{prefixes[kind]}{field.alias or name}."
                    to_visit.append(inner)
    return prefixes
