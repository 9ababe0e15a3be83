"""Runs Vidur for `benchmarks.simulator_vidur`, in a virtual environment with Vidur 0.0.26.

Reads a job (JSON: requests, limits and step times) from standard input, and prints one JSON line: seconds of
Vidur's event loop, steps and mean TTFT.
"""

import gc
import json
import logging
import sys
import tempfile
import time
from typing import Any


def install(job: dict[str, Any]) -> list[Any]:
    """Register the job's step times and requests in Vidur; returns the list that will hold the requests."""
    from vidur.entities import Request
    from vidur.execution_time_predictor.execution_time_predictor_registry import (
        ExecutionTimePredictorRegistry,
    )
    from vidur.execution_time_predictor.random_forrest_execution_time_predictor import (
        RandomForrestExecutionTimePredictor,
    )
    from vidur.request_generator.base_request_generator import BaseRequestGenerator
    from vidur.request_generator.request_generator_registry import RequestGeneratorRegistry
    from vidur.types import ExecutionTimePredictorType, RequestGeneratorType

    requests_out: list[Any] = []

    class GivenTimes(RandomForrestExecutionTimePredictor):  # type: ignore[misc]
        """Vidur's predictor with tables from the job."""

        def _load_predictions_from_hf(self) -> dict[str, Any]:
            nothing = {(tokens,): 0.0 for tokens, _ in job["tokens_ms"]}
            single = "attn_pre_proj attn_post_proj attn_rope attn_kv_cache_save mlp_down_proj mlp_act"
            names = [*single.split(), "input_layernorm", "post_attention_layernorm", "add"]
            return {
                **dict.fromkeys(names, nothing),
                "mlp_up_proj": {(tokens,): ms for tokens, ms in job["tokens_ms"]},
                "attn_decode": {(batch, context): ms for batch, context, ms in job["decode_ms"]},
                "attn_prefill": {(context, chunk): ms for context, chunk, ms in job["prefill_ms"]},
            }

    class GivenRequests(BaseRequestGenerator):  # type: ignore[misc]
        def generate_requests(self) -> list[Any]:
            requests_out.extend(Request(*row) for row in job["requests"])
            return list(requests_out)

    for registry, key, given in (
        (ExecutionTimePredictorRegistry, ExecutionTimePredictorType.RANDOM_FORREST, GivenTimes),
        (RequestGeneratorRegistry, RequestGeneratorType.TRACE_REPLAY, GivenRequests),
    ):
        registry.unregister(key)
        registry.register(key, given)
    return requests_out


def settings(job: dict[str, Any], folder: str) -> Any:
    """Llama 3 8B on one A100 per replica, chunked prefill, no metrics."""
    from vidur.config import config as options

    return options.SimulationConfig(
        log_level="error",
        cluster_config=options.ClusterConfig(
            num_replicas=job["replicas"],
            replica_config=options.ReplicaConfig(
                model_name="meta-llama/Llama-3-8B",
                num_pipeline_stages=1,
                tensor_parallel_size=1,
                device="a100",
                network_device="a100_dgx",
            ),
            cache_config=options.CacheConfig(block_size=job["block_size"], num_blocks=job["blocks"]),
            global_scheduler_config=options.RoundRobinGlobalSchedulerConfig(),
            replica_scheduler_config=options.SarathiSchedulerConfig(
                batch_size_cap=job["max_running"], chunk_size=job["max_batched_tokens"]
            ),
        ),
        request_generator_config=options.TraceRequestGeneratorConfig(max_tokens=job["context"]),
        execution_time_predictor_config=options.RandomForrestExecutionTimePredictorConfig(
            kv_cache_prediction_granularity=job["granularity"],
            prediction_max_prefill_chunk_size=job["max_batched_tokens"],
            prediction_max_batch_size=job["max_running"],
            prediction_max_tokens_per_request=job["context"],
            attention_decode_batching_overhead_fraction=0.0,
            cache_dir=f"{folder}/cache",
            use_native_execution_time_predictor=True,
        ),
        metrics_config=options.MetricsConfig(
            write_metrics=False,
            enable_chrome_trace=False,
            store_plots=False,
            store_request_metrics=False,
            store_batch_metrics=False,
            store_utilization_metrics=False,
            output_dir=folder,
        ),
    )


def main() -> None:
    job = json.load(sys.stdin)
    from vidur.entities import Batch
    from vidur.simulator import Simulator

    logging.getLogger("vidur").setLevel(logging.ERROR)
    requests = install(job)
    with tempfile.TemporaryDirectory() as folder:
        simulator = Simulator(settings(job, folder))
        gc.collect()
        started = time.perf_counter()
        simulator.run()
        seconds = time.perf_counter() - started
    waited = [request.prefill_completed_at - request.arrived_at for request in requests]
    result = {
        "seconds": seconds,
        "steps": Batch.generate_id(),
        "finished": sum(request.completed for request in requests),
        "ttft_s": sum(waited) / len(waited),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
