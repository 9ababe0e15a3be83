"""The device-map problem of a model spec: layer sizes with embedding and output head."""

from collections.abc import Mapping

from shoal.core.cluster import ClusterSpec
from shoal.forecast.model_spec import ModelSpec
from shoal.place.device_maps.problem import MapProblem


def problem_of(
    model: ModelSpec, cluster: ClusterSpec, bytes_per_s: Mapping[str, float], reserve_bytes: int
) -> MapProblem:
    """Layers of a model; the first includes the embedding, the last an untied output head.

    bytes_per_s, reserve_bytes: as in ``MapProblem``. A pass is of one token and reads all weights, which
    overestimates mixtures of experts.
    """
    each = model.weight_bytes_each
    layer = round((model.attention_weights + model.mlp_weights) * each)
    embedding = round(model.vocab * model.hidden * each)
    layers = [layer] * model.layers
    layers[0] += embedding
    layers[-1] += 0 if model.tied else embedding
    return MapProblem(
        cluster=cluster,
        layer_bytes=layers,
        bytes_per_s=bytes_per_s,
        reserve_bytes=reserve_bytes,
        activation_bytes=round(model.hidden * each),
    )
