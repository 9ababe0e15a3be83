"""Sampling defaults in effect: a service's own, completed by those that its model's makers advise."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.core import Service
from shoal.models import advised_sampling


def with_sampling_defaults(services: Sequence[Service], folders: Mapping[str, Path]) -> tuple[Service, ...]:
    """The services with every sampling default set; raises ModelUnavailable if a model's has no meaning.

    folders: where each service's model lies, by service name.
    """
    return tuple(
        replace(s, sampling=s.sampling.with_fallback(advised_sampling(s.model, folders[s.name])))
        for s in services
    )
