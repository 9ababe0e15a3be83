"""Log lines about weights that come and leave."""

import logging
from collections.abc import Iterable, Mapping

from shoal.core import Arrival
from shoal.schedule.weights import WeightsEntry

_log = logging.getLogger(__name__)


def log_arrival(arrival: Arrival, weights: Mapping[str, WeightsEntry]) -> None:
    """Log the end of a fetch. weights: those of the engine, by name."""
    services = _services(arrival.weights, weights)
    if arrival.error is not None:
        _log.warning("the weights of %s could not be fetched: %s", services, arrival.error)
    else:
        _log.debug("the weights of %s came in %.3f s", services, arrival.seconds)


def log_evictions(names: Iterable[str], weights: Mapping[str, WeightsEntry]) -> None:
    """Log weights that leave with a plan, if any do. weights: as in ``log_arrival``."""
    for name in names:
        _log.debug("the weights of %s leave", _services(name, weights))


def _services(name: str, weights: Mapping[str, WeightsEntry]) -> str:
    """The services on some weights, since names of weights contain paths."""
    return ", ".join(weights[name].states) if name in weights else "a removed service"
