"""Command-line flags of simulations (``shoal simulate``); those of the scheduler are the servers' own."""

from shoal.cluster.manager.dispatch import DISPATCH_NAMES
from shoal.config.flags import ENGINE_FLAGS, Flag, overlay
from shoal.config.setting_tree import Node, Table

_SHARED_FLAGS = ("kv-cache-dtype", "block-size", "layout", "prefix-caching", "swap", "weights-memory")

WORKLOAD_FLAGS = (
    Flag("trace", "workload.trace", "PATH", "Trace to replay: Azure, Mooncake, BurstGPT, ShareGPT, ..."),
    Flag("format", "workload.format", "NAME", "Format of the trace, where its content does not tell."),
    Flag("workload", "workload.lengths", "NAME", "Draw lengths: sharegpt, azure-conversation, ..."),
    Flag("requests", "workload.requests", "N", "Number of requests; of a trace, the first N."),
    Flag(
        "rate", "workload.rate", "PER_SECOND", "Requests per second; a trace is stretched or squeezed to it."
    ),
    Flag(
        "clients",
        "workload.clients",
        "N",
        "N users, each waiting for the answer to a request before the next (closed loop).",
    ),
    Flag("seed", "workload.seed", "N", "Keys every draw."),
)

SCENARIO_FLAGS = (
    Flag("model", "latency.roofline.model", "NAME", "Model on record, or its config.json."),
    Flag(
        "device", "latency.roofline.device", "NAME", "Device whose data sheet gives step times: a100-80, ..."
    ),
    Flag("tp", "latency.roofline.tp", "N", "Devices that share the model (tensor parallelism)."),
    *WORKLOAD_FLAGS,
    Flag("engines", "engines", "N", "Replicas of the engine."),
    Flag("dispatch", "dispatch", "NAME", f"Which engine a request goes to: {', '.join(DISPATCH_NAMES)}."),
    Flag("kv-memory", "kv_cache.memory", "SIZE", "Size of each engine's KV pool, e.g. 40GiB."),
    Flag("kv-tokens", "kv_cache.tokens", "N", "The same in tokens."),
    *(flag for flag in ENGINE_FLAGS if flag.name in _SHARED_FLAGS or flag.key.startswith("scheduler.")),
)

_SIZES = ("kv_cache.memory", "kv_cache.tokens", "kv_cache.blocks")
_EXCLUDED = {
    "workload.trace": ("format", "lengths", "arrivals", "rate", "time_scale"),
    "workload.rate": ("clients", "time_scale"),
    "workload.clients": ("rate",),
    "latency.roofline": ("fit", "profile", "service", "tp", "model", "device", "link", "overhead"),
    **dict.fromkeys(_SIZES, ("memory", "tokens", "blocks")),
}
"""By key that a flag sets: keys of the same section in a file that it excludes."""


def apply_flags(file: Table, flags: Table) -> Table:
    """The settings of ``file``, overridden by ``flags``, without the keys that the flags exclude."""
    for key, excluded in _EXCLUDED.items():
        section, name = key.split(".")
        given, written = flags.entries.get(section), file.entries.get(section)
        if isinstance(given, Table) and name in given.entries and isinstance(written, Table):
            kept: dict[str, Node] = {k: v for k, v in written.entries.items() if k not in excluded}
            left = Table(kept, written.where, written.key_places)
            file = Table({**file.entries, section: left}, file.where, file.key_places)
    return overlay(file, flags)
