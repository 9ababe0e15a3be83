"""Server configurations of ``chaos --configs``, by name: schedulers, swap, packing, SLOs, small pools."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""For the base model, which has no template."""

SMALL, TINY = "24MiB", "16MiB"
"""KV pools in which some requests are queued, and in which nearly all are."""


@dataclass(frozen=True)
class Configuration:
    """A server's configuration.

    settings: added to the common ones, by section. engines: their number. kv_cache_dtype: changes answers.
    codes: expected errors, besides those of ended engines.
    """

    name: str
    settings: Settings = field(default_factory=dict)
    engines: int = 1
    kv_memory: str = "64MiB"
    kv_cache_dtype: str = "auto"
    codes: tuple[str, ...] = ()

    def document(self, port: int, cluster: str) -> dict[str, Any]:
        """Content of the configuration file."""
        services = [
            {"name": "chat", "model": "smollm2", "dtype": "int8"},
            {"name": "twin", "model": "smollm2", "dtype": "int8"},
            {"name": "complete", "model": "gemma3-270m", "dtype": "int8", "chat_template": CHAT_TEMPLATE},
        ]
        common = self.settings.get("services", {})
        kv_cache = {"memory": self.kv_memory, "dtype": self.kv_cache_dtype}
        watch = {
            "name": cluster,
            "heartbeat": "0.5s",
            "hung_after": "3s",
            "orphan_after": "10s",
            "wait_for_engine": "150s",  # on a busy machine an engine loads its models for a minute
            "restart": {"first": "0.2s", "max": "1s"},
        }
        return {
            "devices": [{"device": "cpu", "threads": 1} for _ in range(self.engines)],
            "services": [service | common for service in services],
            "kv_cache": kv_cache | self.settings.get("kv_cache", {}),
            "scheduler": self.settings.get("scheduler", {}),
            "cluster": watch | self.settings.get("cluster", {}),
            "server": {"port": port, "drain": "10s"},
        }


def _scheduled(name: str, kv_memory: str = SMALL, **scheduler: Any) -> Configuration:
    return Configuration(name, {"scheduler": scheduler}, kv_memory=kv_memory)


def _packed(name: str, dispatch: str, kv_memory: str = SMALL, **scheduler: Any) -> Configuration:
    cluster = {"dispatch": dispatch, "packing": {"epoch": "0.3s"}}
    return Configuration(name, {"cluster": cluster, "scheduler": scheduler}, engines=2, kv_memory=kv_memory)


QUIET = Configuration("quiet", {"scheduler": {"preset": "vllm"}, "kv_cache": {"prefix_caching": False}})
"""Its answers, to one request at a time, are the reference."""

CONFIGURATIONS = (
    Configuration("default"),
    _scheduled("depth-2", depth=2),
    _scheduled("iterations", max_iterations=8),
    Configuration(
        "vllm-no-prefixes",
        {"scheduler": {"preset": "vllm"}, "kv_cache": {"prefix_caching": False}},
        kv_memory=SMALL,
    ),
    _scheduled("orca", preset="orca"),
    _scheduled("alpaserve", preset="alpaserve", max_iterations=4),
    _scheduled("muxserve-split", "64MiB", preset="muxserve"),
    _scheduled("fastserve-swap", TINY, preset="fastserve", depth=2),
    _scheduled("seallm", preset="seallm"),
    _scheduled("seallm-join", preset="seallm-join", depth=2),
    _scheduled("seallm-batch", preset="seallm-batch"),
    _scheduled("past-future", preset="past-future"),
    _scheduled("overcommitted", TINY, preset="lightllm-conservative", preemption_mode="recompute"),
    _scheduled("slices", preset="scls-cb", admission={"policy": "slice", "tokens": 8}),
    Configuration(
        "goals",
        {
            "services": {"slo": {"ttft": "1s", "e2e": "4s"}},
            "scheduler": {"order": "edf", "on_hopeless": "last", "preempt_for_waiting": "less-urgent"},
        },
        kv_memory=SMALL,
    ),
    Configuration(
        "refusing",
        {"services": {"slo": {"ttft": "1s"}}, "scheduler": {"on_hopeless": "refuse", "depth": 2}},
        kv_memory=SMALL,
        codes=("goals_out_of_reach",),
    ),
    _scheduled("mlfq-recompute", TINY, order="mlfq", victim="newest", preemption_mode="recompute"),
    _scheduled(
        "predicted-swap",
        TINY,
        order="shortest-remaining",
        admission="predicted",
        victim="large-young",
        starvation="1s",
    ),
    _scheduled(
        "gaps-co-batched", max_token_gap="30ms", co_batch_rows=2, max_batched_tokens=64, starvation="2s"
    ),
    Configuration(
        "int8-kv",
        {"scheduler": {"victim": "smallest-that-fits"}, "kv_cache": {"block_size": 8}},
        kv_memory=TINY,
        kv_cache_dtype="int8",
    ),
    Configuration("two-engines", {"cluster": {"dispatch": "prefix"}}, engines=2),
    _packed("mell-moves", "mell"),
    _packed("load-balance-moves", "load-balance", depth=2),
    _packed("best-fit-moves", "best-fit", TINY, preemption_mode="recompute", victim="fewest-tokens"),
    Configuration("idle", {"services": {"idle_after": "1s"}}),
)
"""Each has a combination that no other has."""


def named(names: list[str]) -> list[Configuration]:
    """Configurations by name, in this order; all without names. Raises ValueError."""
    known = {configuration.name: configuration for configuration in CONFIGURATIONS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no configuration {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names] or list(CONFIGURATIONS)
