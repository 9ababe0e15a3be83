"""Whether the weights of a service are in no engine's memory, as far as the server knows."""

from shoal.schedule.policies.residency import Place
from shoal.serve.backend import Backend


def weights_are_absent(backend: Backend, service: str) -> bool:
    """Whether all engines that have loaded a service have its weights elsewhere than in their memory.

    Engines tell it once a second. False if none has loaded it, or none has told yet.
    """
    places = [place for engine in backend.engines if (place := engine.place(service)) is not None]
    return bool(places) and Place.RESIDENT not in places
