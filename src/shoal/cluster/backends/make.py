"""Chooses the backend: local or Ray, as the options say."""

from shoal.cluster.backends.interface import EngineBackend
from shoal.cluster.backends.local import LocalBackend
from shoal.cluster.backends.node_start import drop_early_node
from shoal.cluster.options import ClusterOptions
from shoal.core import ConfigError


def make_backend(options: ClusterOptions) -> EngineBackend:
    """The backend of a cluster; raises ConfigError if its package is missing."""
    if options.backend == "local":
        return LocalBackend(
            options.name, options.orphan_after_s, options.heartbeat_s, options.hung_after_s / 2
        )
    drop_early_node()
    try:
        # Imported here: it takes a second, and is an optional dependency.
        from shoal.cluster.backends.ray.backend import RayBackend
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "cluster.backend: ray needs the package ray: pip install 'shoal[cluster]'"
        ) from error
    return RayBackend(options)
