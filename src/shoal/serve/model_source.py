"""From a service to what serving it needs: its files, its sampling defaults and its tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.core import InvalidRequest, Service
from shoal.engine.sampling import with_sampling_defaults
from shoal.models import Progress, Tokenizer, resolve_model
from shoal.models.chat_template import ChatTemplate
from shoal.serve.backend import TextCodec
from shoal.serve.workers import Workers


@dataclass(frozen=True, slots=True)
class PulledService:
    """A service whose model is on this machine."""

    service: Service
    """With every sampling default set."""
    folder: Path
    """Where its model is."""
    tokenizer: TextCodec
    """Its tokenizer."""


PullService = Callable[[Service, Progress | None], PulledService]
"""Downloads and converts what is missing; blocks for as long as that takes."""


async def check_template(workers: Workers, service: Service) -> None:
    """Compile the chat template that ``service`` brings, within the limits that rendering has.

    Raises InvalidRequest that names ``chat_template`` where that fails.
    """
    if service.chat_template is None:
        return
    template = ChatTemplate(service.chat_template, {})
    try:
        await workers.run("templates", "compiling this chat template", template.check)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param="chat_template") from None


def pull_service(service: Service, progress: Progress | None = None) -> PulledService:
    """Download and convert the model of ``service`` where that is needed, and read its tokenizer.

    Raises ModelUnavailable or ModelUnsupported.
    """
    folder = resolve_model(service.model, progress)
    (known,) = with_sampling_defaults((service,), {service.name: folder})
    tokenizer = Tokenizer.from_folder(folder, service.chat_template)
    tokenizer.least_tokens("")  # reads the vocabulary once, so that no request waits for it
    return PulledService(known, folder, tokenizer)
