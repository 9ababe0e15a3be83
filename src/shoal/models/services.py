"""Resolving a service's model to a folder, also for random weights."""

from pathlib import Path

from shoal.core import ConfigError, Service
from shoal.models.progress import Progress
from shoal.models.resolve import check_model, resolve_config, resolve_model


def check_service(service: Service) -> None:
    """Raise as ``check_model`` does for its model, and ConfigError for random weights of a GGUF file."""
    check_model(service.model)
    if service.random_seed is not None and Path(service.model).expanduser().is_file():
        raise ConfigError(
            f"service {service.name!r}: weights: random are made from a config.json, which the GGUF file"
            f" {service.model} does not have; name a folder that has one, or write weights: files"
        )


def resolve_service(service: Service, progress: Progress | None = None) -> Path:
    """Folder with the files that the service needs of its model; pulls or converts on first use.

    Uses ``resolve_model``, or ``resolve_config`` for random weights. Raises as these and ``check_service``
    do.
    """
    check_service(service)
    resolve = resolve_model if service.random_seed is None else resolve_config
    return resolve(service.model, progress)
