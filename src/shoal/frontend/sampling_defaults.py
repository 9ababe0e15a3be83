"""Sampling defaults of services, completed by those in the model's generation config."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.core import Service
from shoal.models import advised_sampling


def with_sampling_defaults(services: Sequence[Service], folders: Mapping[str, Path]) -> tuple[Service, ...]:
    """The services with all sampling defaults; raises ModelUnavailable for invalid defaults of a model.

    folders: model folders by service name.
    """
    return tuple(
        replace(s, sampling=s.sampling.with_fallback(advised_sampling(s.model, folders[s.name])))
        for s in services
    )
