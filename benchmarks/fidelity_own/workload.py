"""Workload of `benchmarks.fidelity_own`: cases of services, lengths, load and arrivals."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shoal import SamplingParams
from shoal.core import Request
from shoal.forecast import StepRows, StepTimes
from shoal.workload import Poisson
from shoal.workload.presets import SHAREGPT

MAX_TOKENS = 128
"""``max_tokens`` of every request; it ends earlier, at a length that policies do not know."""

LEAST_OUTPUT = 8
"""With fewer, TPOT is a mean of few values."""


@dataclass(frozen=True)
class Lengths:
    """ShareGPT's lengths, scaled and capped. share: of all requests."""

    share: float
    scale: float
    max_prompt: int
    max_output: int

    def sample(self, count: int, seed: int) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of ``count`` requests."""
        prompts, outputs = SHAREGPT.sample(count, seed)
        return list(
            zip(
                np.clip(np.rint(prompts * self.scale), 4, self.max_prompt).astype(int).tolist(),
                np.clip(np.rint(outputs * self.scale), LEAST_OUTPUT, self.max_output).astype(int).tolist(),
                strict=True,
            )
        )


SERVICES = ("chat", "complete")
CASES: Mapping[str, Mapping[str, Lengths]] = {
    "one service": {"chat": Lengths(1.0, 0.22, 256, 96)},
    "two services": {"chat": Lengths(0.7, 0.13, 128, 48), "complete": Lengths(0.3, 0.45, 256, 96)},
}
"""Lengths by service, for each case."""


def capacity(times: StepTimes, case: Mapping[str, Lengths], kv_tokens: int, block_size: int) -> float:
    """Requests per second that a 90% full pool of ``kv_tokens`` can serve, with one service per step."""
    seconds = 0.0
    for one in case.values():
        drawn = np.array(one.sample(2_000, 0), dtype=np.float64)
        prompt, output = (float(mean) for mean in drawn.mean(axis=0))
        held = prompt + output / 2
        running = max(1, int(0.9 * kv_tokens / (held + block_size / 2) / len(case)))
        context = int(running * held)
        decode = float(times.decode_times(running, context, 1)[0])
        joined = times.step_time(StepRows(running, context, ((round(prompt), 0),), running + 1))
        seconds += one.share * (output / running * decode + joined - decode)
    return 1 / seconds


def make_requests(case: Mapping[str, Lengths], count: int, rate: float, seed: int) -> list[Request]:
    """Poisson arrivals from time 0; prompts are random tokens without common prefixes."""
    rng = np.random.default_rng((seed, 1))
    names = rng.choice(list(case), size=count, p=[one.share for one in case.values()]).tolist()
    lengths = {name: deque(one.sample(count, seed)) for name, one in case.items()}
    times = Poisson(rate).times_ns(count, seed)
    requests = []
    for number, (name, at_ns) in enumerate(zip(names, times, strict=True)):
        prompt, output = lengths[name].popleft()
        requests.append(
            Request(
                id=f"r{number}",
                service=name,
                prompt=rng.integers(100, 40_000, prompt).tolist(),
                sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
                arrival_ns=at_ns - times[0],
                true_output_tokens=output,
            )
        )
    return requests
