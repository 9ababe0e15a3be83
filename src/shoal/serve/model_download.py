"""Downloads and converts a service's model, and reads its sampling defaults and its tokenizer."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from anyio import to_thread

from shoal.core import InvalidRequest, ModelUnsupported, Service
from shoal.frontend.sampling_defaults import with_sampling_defaults
from shoal.models import Progress, has_tokenizer, resolve_service
from shoal.models.chat_template.template import ChatTemplate
from shoal.serve.backend import TextCodec
from shoal.serve.cpu_workers import Workers
from shoal.serve.tokenizers import Tokenizers


@dataclass(frozen=True, slots=True)
class FetchedService:
    """A service whose model is on this machine."""

    service: Service
    """With every sampling default set."""
    folder: Path


@dataclass(frozen=True, slots=True)
class PulledService:
    """A service whose model is on this machine, with its tokenizer."""

    service: Service
    """With every sampling default set."""
    folder: Path
    tokenizer: TextCodec


PullService = Callable[[Service, Progress], Awaitable[PulledService]]
"""Downloads and converts a model, and reads its tokenizer, without blocking the event loop."""


async def check_template(workers: Workers, service: Service) -> None:
    """Compile the configured chat template of ``service``, within the limits of rendering.

    Raises an InvalidRequest about ``chat_template`` if that fails.
    """
    if service.chat_template is None:
        return
    template = ChatTemplate(service.chat_template, {})
    try:
        await workers.run("templates", "compiling this chat template", template.check)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param="chat_template") from None


def fetch_service(service: Service, progress: Progress | None = None) -> FetchedService:
    """Download and convert the model of ``service`` unless it is in the cache.

    Raises ModelUnavailable or ModelUnsupported.
    """
    folder = resolve_service(service, progress)
    if service.random_seed is not None and not has_tokenizer(folder):
        raise ModelUnsupported(
            f"service {service.name!r}: {folder} has no tokenizer files (tokenizer.json), which a server"
            " needs for random weights, too; put those of a like model there"
        )
    (resolved,) = with_sampling_defaults((service,), {service.name: folder})
    return FetchedService(resolved, folder)


async def pull_service(tokenizers: Tokenizers, service: Service, progress: Progress) -> PulledService:
    """``fetch_service`` for a running server, and the tokenizer.

    Raises ModelUnavailable, ModelUnsupported, or ConfigError for a chat template that is not valid.
    """
    fetched = await to_thread.run_sync(fetch_service, service, progress, abandon_on_cancel=True)
    tokenizer = await tokenizers.load(fetched.folder, service.chat_template)
    return PulledService(fetched.service, fetched.folder, tokenizer)
