"""Shoal's offline process of `benchmarks.throughput`; also reports the parts of its step times."""

from collections.abc import Mapping
from typing import Any

import shoal
from benchmarks.throughput.job import Generate, Prompts, serve
from shoal import SamplingParams, Service, Shoal
from shoal.kvcache import KVCacheOptions

PARTS = ("schedule", "prepare", "forward", "sample", "update", "reply")


def start(setup: Mapping[str, Any]) -> tuple[Generate, Mapping[str, str]]:
    """The setup has several `models` for alternating prompts, `dtype`, `device`, `kv_cache` and `kv`."""
    services = [
        Service(name=f"model-{number}", model=model, dtype=setup["dtype"])
        for number, model in enumerate(setup["models"])
    ]
    engine = Shoal(
        services,
        device=setup["device"],
        threads=setup["threads"],
        kv_cache=KVCacheOptions(**setup["kv_cache"]),
        progress=False,
    )

    def generate(prompts: Prompts, output: int) -> Mapping[str, Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        names = [services[number % len(services)].name for number in range(len(prompts))]
        before = engine.stats().steps
        outputs = engine.generate(prompts, sampling, service=names, progress=False)
        after = engine.stats().steps
        return {
            "tokens": sum(len(one.outputs[0].tokens) for one in outputs),
            "steps": after.count - before.count,
            "parts_ns": {p: getattr(after, f"{p}_ns") - getattr(before, f"{p}_ns") for p in PARTS},
        }

    return generate, {"version": shoal.__version__, "kv": setup["kv"]}


if __name__ == "__main__":
    serve(start)
