"""From a service to what serving it needs: its files, its sampling defaults and its tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.core import Service
from shoal.engine.sampling import with_sampling_defaults
from shoal.models import Progress, Tokenizer, resolve_model
from shoal.serve.backend import TextCodec


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


def pull_service(service: Service, progress: Progress | None = None) -> PulledService:
    """Download and convert the model of ``service`` where that is needed, and read its tokenizer.

    Raises ModelUnavailable or ModelUnsupported.
    """
    folder = resolve_model(service.model, progress)
    (known,) = with_sampling_defaults((service,), {service.name: folder})
    tokenizer = Tokenizer.from_folder(folder, service.chat_template)
    tokenizer.least_tokens("")  # reads the vocabulary once, so that no request waits for it
    return PulledService(known, folder, tokenizer)
