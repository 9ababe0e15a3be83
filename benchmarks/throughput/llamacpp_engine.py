"""llama.cpp process of `benchmarks.throughput`; runs in a virtual environment with `xllamacpp`."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp

from benchmarks.throughput.job import Generate, Prompts, serve


def start(setup: Mapping[str, Any]) -> tuple[Generate, Mapping[str, str]]:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = setup["model"]
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = setup["threads"]
    parameters.n_parallel = setup["streams"]
    # One cache for all streams, as large as the largest job.
    parameters.kv_unified = True
    parameters.n_ctx = setup["job_tokens"] + setup["streams"]
    parameters.n_batch = parameters.n_ubatch = 2048
    parameters.ctx_shift = False
    parameters.cache_ram_mib = 0
    server = xllamacpp.Server(parameters)

    def complete(prompt: Sequence[int], output: int) -> int:
        body = {"prompt": list(prompt), "n_predict": output, "ignore_eos": True, "temperature": 0}
        answer = server.handle_completions(body | {"cache_prompt": False})
        return int(answer["usage"]["completion_tokens"])

    def generate(prompts: Prompts, output: int) -> Mapping[str, Any]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return {"tokens": sum(threads.map(complete, prompts, [output] * len(prompts)))}

    return generate, {"version": xllamacpp.__version__, "kv": "float16"}


if __name__ == "__main__":
    serve(start)
