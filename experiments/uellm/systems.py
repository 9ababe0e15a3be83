"""The systems compared in UELLM's Fig. 5: each a device map and a batching algorithm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from experiments.padded.cluster import StaticCluster
from experiments.padded.presets import static_preset
from experiments.padded.simulated_request import StaticLimits
from experiments.uellm.testbed import GB, LAYER_BYTES, LAYERS, busy_share, even_map, four_devices
from experiments.uellm.workload import (
    MAX_OUTPUT,
    MAX_PROMPT,
    SERVICE,
    BucketPredictor,
    question_requests,
)
from shoal.batches import MemoryByBytes
from shoal.core import Request, attainment, met
from shoal.forecast import Bilinear, FittedTimes, LatencyModel, PaddedLatency
from shoal.measure.records import RequestRow
from shoal.place.device_maps import DEVICE_MAPS, DeviceMap, MapProblem
from shoal.schedule import SchedulerOptions
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, token_layout

DEVICE_BYTES = 24 * GB
SPARE_BYTES = GB
"""Of each device, reserved for neither weights nor KV."""
TOKEN_BYTES = 4 * 28 * 4096
ACCURACY = 0.9951
PROMPT_TOKEN_S = 3.6e-4
CONTEXT_S = 1.4e-7
BLOCK_TOKENS = 16
TEST_REQUESTS = 64
TEST_SEED = 1000
"""Of the requests of stress tests; runs use other seeds."""

HELR, EVEN, SEARCHED = "helr", "even", "searched"


@dataclass(frozen=True, slots=True)
class BatchingSystem:
    device_map: str
    """HELR's, even over all devices, or the best in stress tests."""
    batching: str | None
    """A static preset; None: our continuous batching."""
    max_batch: int | None = None
    """None: bounded by memory alone."""


SYSTEMS: Mapping[str, BatchingSystem] = {
    "s3": BatchingSystem(EVEN, "s3", 16),
    "s3-memory": BatchingSystem(EVEN, "s3"),
    "morphling": BatchingSystem(SEARCHED, "fifo", 16),
    "ud": BatchingSystem(HELR, "fifo", 16),
    "ub": BatchingSystem(EVEN, "uellm", 64),
    "ua": BatchingSystem(HELR, "uellm", 64),
    "ua-literal": BatchingSystem(HELR, "uellm-literal", 64),
    "ua-odbs": BatchingSystem(HELR, "odbs", 64),
    "shoal": BatchingSystem(HELR, None),
}
"""The paper's five by its names, and ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Figures of one run."""

    latency_s: float
    """Mean."""
    attainment: float
    """Share of requests within their SLO."""
    tokens: int
    """Output tokens of all requests."""
    duration_s: float
    """Until the last answer."""


@dataclass(frozen=True, slots=True)
class MappedModel:
    """The model on the paper's four devices under a device map."""

    problem: MapProblem
    """The devices, all of them free."""
    device_map: DeviceMap
    tests_s: float = 0.0
    """Time of stress tests before the map was chosen."""

    @property
    def utilisation(self) -> float:
        """Share of a pass in which a device in use computes."""
        return busy_share(self.problem, self.device_map)

    @property
    def slowdown(self) -> float:
        """Computing time relative to the fastest device alone."""
        fastest = max(self.problem.bytes_per_s.values())
        return self.device_map.cost_s * fastest / (LAYERS * LAYER_BYTES)

    @property
    def kv_bytes(self) -> int:
        """Memory for KV on the devices in use."""
        return len(self.device_map.stages) * (DEVICE_BYTES - SPARE_BYTES) - LAYERS * LAYER_BYTES

    @property
    def times(self) -> PaddedLatency:
        iteration_s = self.device_map.cost_s
        token_s, context_s = PROMPT_TOKEN_S * self.slowdown, CONTEXT_S * self.slowdown
        return PaddedLatency(
            prefill=Bilinear(product=token_s, sequence=0.0, length=0.0, constant=iteration_s),
            decode=Bilinear(product=context_s, sequence=token_s, length=0.0, constant=iteration_s),
        )

    def serve(self, system: BatchingSystem, requests: Sequence[Request]) -> Served:
        """Simulate requests that are all queued at the start."""
        if system.batching is None:
            return self._serve_continuously(requests)
        cluster = StaticCluster(
            replace(static_preset(system.batching), max_batch=system.max_batch),
            StaticLimits(context_tokens=MAX_PROMPT + MAX_OUTPUT),
            workers=1,
            estimate=self.times,
            memory=MemoryByBytes(token_bytes=TOKEN_BYTES, available_bytes=self.kv_bytes),
            predictor=BucketPredictor(ACCURACY),
        )
        run = cluster.run(requests)
        return _served(run.requests, run.report.duration_s)

    def attainment_alone(self, requests: Sequence[Request]) -> float:
        """Share of requests that meet their SLO in a batch of one, without queueing."""
        times_s = [self.times.serve(1, len(one.prompt), one.true_output_tokens or 1) for one in requests]
        limits_s = [one.slo.e2e_s for one in requests if one.slo is not None]
        return fmean(
            limit_s is None or time_s <= limit_s for time_s, limit_s in zip(times_s, limits_s, strict=True)
        )

    def _serve_continuously(self, requests: Sequence[Request]) -> Served:
        costs = LatencyModel(
            constant_s=self.device_map.cost_s,
            sequence_s=0.0,
            token_s=PROMPT_TOKEN_S * self.slowdown,
            context_s=CONTEXT_S * self.slowdown,
            work_s=CONTEXT_S * self.slowdown,
        )
        service = ServiceSpec(times=FittedTimes(costs), context_tokens=MAX_PROMPT + MAX_OUTPUT)
        spec = EngineSpec(
            services={SERVICE: service},
            layout=token_layout(self.kv_bytes // TOKEN_BYTES // BLOCK_TOKENS, BLOCK_TOKENS, SERVICE),
            scheduler=SchedulerOptions(preemption_mode="recompute", max_token_gap_s=1e9),
        )
        record = Simulation([spec], OpenLoop(requests)).run()
        return _served(record.requests, record.end_ns / 1e9)


def mapped_models() -> dict[str, MappedModel]:
    """The model under HELR's map, the even map, and the best of the maps that Morphling tests."""
    problem = four_devices([DEVICE_BYTES] * 4)
    tried = [MappedModel(problem, even_map(problem, count)) for count in range(1, 5)]
    requests = question_requests(TEST_REQUESTS, TEST_SEED)
    tests = [one.serve(SYSTEMS["morphling"], requests) for one in tried]
    best = min(range(len(tried)), key=lambda at: tests[at].duration_s)
    return {
        HELR: MappedModel(problem, DEVICE_MAPS["helr"](problem)),
        EVEN: tried[-1],
        SEARCHED: replace(tried[best], tests_s=sum(test.duration_s for test in tests)),
    }


def _served(rows: Sequence[RequestRow], duration_s: float) -> Served:
    return Served(
        latency_s=fmean(row.e2e_s for row in rows),
        attainment=attainment(met(row, row.slo) for row in rows),
        tokens=sum(row.output_tokens for row in rows),
        duration_s=duration_s,
    )
