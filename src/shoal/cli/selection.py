"""The service of ``generate`` and ``chat``, from a model's name, a configuration and flags."""

from dataclasses import replace
from pathlib import Path

from shoal.config import Config, load_config
from shoal.config.setting_tree import Listing, Scalar, Table
from shoal.core import ConfigError, Service
from shoal.models import check_service
from shoal.serve.options import ServerOptions


def select_service(
    model: str | None, *, file: Path | None, settings: Table, flag: str = "--model"
) -> Config[ServerOptions]:
    """The configuration with a single service: the one named ``model``, or a new one for that model.

    Without ``model`` the configuration must have exactly one service. flag: the flag of ``model``, for
    errors. Raises ConfigError, and ModelUnavailable for a model that cannot exist.
    """
    configured = file is not None or "services" in settings.entries
    if model is not None and not configured:
        entry = Listing((Scalar(model, flag),), flag)
        settings = Table({**settings.entries, "services": entry}, settings.where, settings.key_places)
    if model is None and not configured:
        raise ConfigError(f"no model: name one with {flag}, for example smollm2 (see `shoal models list`)")
    config = load_config(ServerOptions, file=file, flags=settings)
    if model is None and len(config.services) > 1:
        names = ", ".join(service.name for service in config.services)
        raise ConfigError(f"several services are configured; choose one with {flag}: {names}")
    service = next(
        (service for service in config.services if model in (None, service.name)),
        Service(name=str(model), model=str(model)),
    )
    check_service(service)
    return replace(config, services=(service,))
