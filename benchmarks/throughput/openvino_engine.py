"""OpenVINO GenAI process of `benchmarks.throughput`; runs in a virtual environment with `openvino-genai`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.throughput.job import Generate, Prompts, serve


def start(setup: Mapping[str, Any]) -> tuple[Generate, Mapping[str, str]]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = setup["kv_gib"]
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    pipeline = openvino_genai.LLMPipeline(
        setup["model"], "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=setup["threads"]
    )

    def generate(prompts: Prompts, output: int) -> Mapping[str, Any]:
        config = openvino_genai.GenerationConfig(max_new_tokens=output, ignore_eos=True, do_sample=False)
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return {"tokens": sum(map(len, pipeline.generate(inputs, config).tokens))}

    # Its default KV on a CPU has 8 bits.
    return generate, {"version": openvino_genai.__version__, "kv": "u8"}


if __name__ == "__main__":
    serve(start)
