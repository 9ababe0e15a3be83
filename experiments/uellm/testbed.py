"""UELLM's devices (Tables 1 and 2), and device maps of ChatGLM2-6B in 33 equal layers on them."""

from collections.abc import Sequence

import numpy as np

from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.forecast import model_spec
from shoal.place.device_maps import DeviceMap, MapProblem, evaluate, stages_of

GB = 10**9
LAYERS = 33
LAYER_BYTES = model_spec("chatglm2-6b").weight_bytes() // LAYERS

TABLE_1 = (
    (16, 11.19, 11.58, 10.84),
    (20, 13.09, 13.48, 12.61),
    (24, 14.85, 15.45, 14.09),
    (28, 17.23, 18.00, 16.16),
    (32, 22.55, 23.07, 22.11),
)
"""Layers on the V100 (the rest is on the RTX 3090); tokens per second: mean, largest, least."""

POWER_W = (350, 300, 250, 150)
"""Power limits of Table 2's devices."""
PIX, NODE = Link(10e9, 20e-6), Link(8e9, 50e-6)
"""Over one PCIe bridge, and over the host bridge."""


def fitted_layer_s() -> tuple[float, float]:
    """Seconds per layer on the V100 and on the RTX 3090, fitted to Table 1 (least squared relative errors).

    Every row crosses the link once; that time is part of both constants.
    """
    layers = np.array([(on_first, LAYERS - on_first) for on_first, *_ in TABLE_1], dtype=float)
    tokens_per_s = np.array([mean for _, mean, *_ in TABLE_1])
    (first_s, second_s), *_ = np.linalg.lstsq(
        layers * tokens_per_s[:, None], np.ones(len(layers)), rcond=None
    )
    return float(first_s), float(second_s)


def pair_problem(v100_layers: int) -> MapProblem:
    """Table 1's devices, with memory for ``v100_layers`` on the V100 and for all on the RTX 3090."""
    v100_s, rtx_3090_s = fitted_layer_s()
    devices = [
        Device(name="GPU#0", kind="v100", host="h", memory_bytes=v100_layers * LAYER_BYTES),
        Device(name="GPU#1", kind="rtx-3090", host="h", memory_bytes=24 * GB),
    ]
    link = Link(10e9, 0.0)  # its time is part of the constants
    cluster = ClusterSpec(devices=devices, host_link=link, network=link)
    return MapProblem(
        cluster=cluster,
        layer_bytes=[LAYER_BYTES] * LAYERS,
        bytes_per_s={"v100": LAYER_BYTES / v100_s, "rtx-3090": LAYER_BYTES / rtx_3090_s},
    )


def even_map(problem: MapProblem, count: int) -> DeviceMap:
    """Layers evenly over the first ``count`` devices, as in accelerate's balanced maps."""
    # The remainder goes to the first ones.
    layers = [(LAYERS + count - 1 - at) // count for at in range(count)]
    names = [device.name for device in problem.cluster.devices[:count]]
    return evaluate(problem, stages_of(list(zip(names, layers, strict=True))))


def busy_share(problem: MapProblem, device_map: DeviceMap) -> float:
    """Mean share of a pass in which a device in use computes; one device computes at a time."""
    kinds = {device.name: device.kind for device in problem.cluster.devices}
    computing_s = sum(
        stage.layers * LAYER_BYTES / problem.bytes_per_s[kinds[stage.device]] for stage in device_map.stages
    )
    return computing_s / device_map.cost_s / len(device_map.stages)


def four_devices(free_bytes: Sequence[int]) -> MapProblem:
    """Table 2's four RTX 3090 with speeds proportional to their power limits.

    The fastest takes as long for a layer as the faster device of Table 1.
    """
    devices = [
        Device(name=f"GPU#{at}", kind=f"{watts} W", host="h", memory_bytes=free)
        for at, (watts, free) in enumerate(zip(POWER_W, free_bytes, strict=True))
    ]
    pairs = {frozenset(("GPU#0", "GPU#1")): PIX, frozenset(("GPU#2", "GPU#3")): PIX}
    fastest = LAYER_BYTES / fitted_layer_s()[0]
    cluster = ClusterSpec(devices=devices, host_link=NODE, network=NODE, pairs=pairs)
    return MapProblem(
        cluster=cluster,
        layer_bytes=[LAYER_BYTES] * LAYERS,
        bytes_per_s={f"{watts} W": fastest * watts / POWER_W[0] for watts in POWER_W},
        activation_bytes=2 * model_spec("chatglm2-6b").hidden,
    )
