"""Step times with data parallelism and expert parallelism: ranks that share the experts of every layer.

Each rank has its own requests, attention and KV. Before the experts of a layer, the tokens of all ranks are
gathered on each rank; every rank computes its experts, and the results are summed and scattered. So all ranks
step together, also those without requests, and the slowest rank determines the step time. vLLM does this with
data and expert parallelism; DeepSeek-V3's report, section 3.4, divides experts in the same way.
"""

from dataclasses import replace
from pathlib import Path

from shoal.core import ConfigError
from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.latency import FloatArray
from shoal.forecast.model_spec import ModelSpec
from shoal.forecast.profile_files.reading import ProfileFiles, measured_device, measured_model, read_profile
from shoal.forecast.profile_files.tables import ProfileTimes, rank_expert_times, require_named, token_range
from shoal.forecast.roofline_ops import Link
from shoal.forecast.step_times import StepRows

_BYTES = 2
"""Size of one number that is gathered or scattered."""


class RankTimes:
    """Step times of a group of ranks, from the profile tables of one device.

    A step of the group is the rows of one rank, with those of the other ranks in ``StepRows.others``.
    """

    def __init__(
        self, files: ProfileFiles, model: ModelSpec, ranks: int, link: Link, imbalance: float = 1.0
    ) -> None:
        """imbalance: tokens computed by the busiest rank's experts, relative to an even share.

        Raises ConfigError if the tables have no experts, or the ranks cannot divide them.
        """
        if model.experts % ranks or not model.experts:
            raise ConfigError(f"{model.name} has {model.experts} experts, which {ranks} ranks cannot divide")
        dense = replace(model, experts=0, experts_per_token=0)
        self._rank_times = ProfileTimes(replace(files, experts={}), dense)
        self._ranks, self._model, self._link = ranks, model, link
        micros = rank_expert_times(files, model, ranks, imbalance, ranks * token_range(files))
        self._expert_s: list[float] = [
            self._exchange_s(tokens) + us / 1e6 for tokens, us in enumerate(micros.tolist())
        ]

    @classmethod
    def load(
        cls,
        folder: str | Path,
        ranks: int,
        *,
        model: ModelSpec | None = None,
        device: DeviceSpec | None = None,
        link: Link | None = None,
        imbalance: float = 1.0,
    ) -> "RankTimes":
        """Read the tables of one device from ``folder``; the arguments are those of ``ProfileTimes.load``."""
        files = read_profile(Path(folder), 1)
        spec = model or require_named(measured_model(files.meta), "model", files, folder)
        sheet = None if link else device or measured_device(files.meta)
        between = link or require_named(sheet, "device", files, folder).link
        return cls(files, spec, ranks, between, imbalance)

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step of all ranks.

        If all ranks only decode, every rank is padded to the largest batch, because kernels are recorded for
        one size (CUDA graphs). With a prompt chunk on any rank there is no padding.
        """
        active, times = (rows, *rows.others), self._rank_times
        longest = max(one.new_tokens for one in active)
        if rows.computes_prompts:
            rank_s = max(times.step_time(one) for one in active)
            return rank_s + self._all_experts_s(sum(one.new_tokens for one in active))
        rank_s = max(times.step_time(one) + times.padding_time(one.new_tokens, longest) for one in active)
        return rank_s + self._all_experts_s(self._ranks * longest)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of a run of decode steps of one rank, while the other ranks are idle."""
        padding_s = self._rank_times.padding_time(sequences, sequences)
        rank_s = self._rank_times.decode_times(sequences, context, steps) + padding_s
        times: FloatArray = rank_s + self._all_experts_s(self._ranks * sequences)
        return times

    def _exchange_s(self, tokens: int) -> float:
        """Seconds of one layer to gather hidden states and router logits, and to scatter the results."""
        if not tokens:
            return 0.0
        gathered = _BYTES * tokens * (self._model.hidden + self._model.experts)
        scattered = _BYTES * tokens * self._model.hidden
        # A gather or scatter sends each byte once, an all-reduce twice.
        return sum(self._link.all_reduce(moved / 2, self._ranks) for moved in (gathered, scattered))

    def _all_experts_s(self, tokens: int) -> float:
        """Seconds of all layers' experts for ``tokens`` of all ranks, including gather and scatter."""
        table = self._expert_s
        last = len(table) - 1
        if tokens <= last:
            return self._model.layers * table[tokens]
        return self._model.layers * (table[last] + (tokens - last) * (table[last] - table[last - 1]))
