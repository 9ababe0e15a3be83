"""Step times of data-parallel ranks that divide the experts of every layer among them.

Each rank has requests, attention and KV of its own. Before the experts of a layer the tokens of all ranks are
gathered on each, every rank computes the experts that it holds, and the results are summed and scattered. So
all ranks step together, those without requests too, and a step lasts as long as the slowest rank's. vLLM does
so with data and expert parallelism; DeepSeek-V3's report, section 3.4, divides experts alike.
"""

from dataclasses import replace
from pathlib import Path

from shoal.core import ConfigError
from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.latency import FloatArray
from shoal.forecast.model_spec import ModelSpec
from shoal.forecast.profile_files.reading import ProfileFiles, measured_device, measured_model, read_profile
from shoal.forecast.profile_files.tables import ProfileTimes, rank_experts, require_named, token_range
from shoal.forecast.roofline_ops import Link
from shoal.forecast.step_times import StepRows

_BYTES = 2
"""Of one number that is gathered or scattered."""


class RankTimes:
    """Step times of a group of ranks, from the tables of one device.

    The step of a group is one rank's rows with those of the others (``StepRows.others``).
    """

    def __init__(
        self, files: ProfileFiles, model: ModelSpec, ranks: int, link: Link, imbalance: float = 1.0
    ) -> None:
        """imbalance: tokens that the busiest rank's experts compute, in units of an even share.

        Raises ConfigError if the tables have no experts, or the ranks cannot divide them.
        """
        if model.experts % ranks or not model.experts:
            raise ConfigError(f"{model.name} has {model.experts} experts, which {ranks} ranks cannot divide")
        dense = replace(model, experts=0, experts_per_token=0)
        self._own = ProfileTimes(replace(files, experts={}), dense)
        self._ranks, self._model, self._link = ranks, model, link
        micros = rank_experts(files, model, ranks, imbalance, ranks * token_range(files))
        self._shared_s: list[float] = [
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
        shape = model or require_named(measured_model(files.meta), "model", files, folder)
        sheet = None if link else device or measured_device(files.meta)
        between = link or require_named(sheet, "device", files, folder).link
        return cls(files, shape, ranks, between, imbalance)

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step of all ranks.

        Where all only decode, every rank computes as many tokens as the longest, because their kernels are
        recorded for one size (CUDA graphs). Beside a prompt each computes its own.
        """
        active = (rows, *rows.others)
        longest = max(one.new_tokens for one in active)
        if rows.computes_prompts:
            own = max(self._own.step_time(one) for one in active)
            return own + self._shared_at(sum(one.new_tokens for one in active))
        own = max(self._own.step_time(one) + self._own.widening(one.new_tokens, longest) for one in active)
        return own + self._shared_at(self._ranks * longest)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of a run of decode steps of one rank, beside others that have nothing to do."""
        own = self._own.decode_times(sequences, context, steps) + self._own.widening(sequences, sequences)
        times: FloatArray = own + self._shared_at(self._ranks * sequences)
        return times

    def _exchange_s(self, tokens: int) -> float:
        """Seconds of one layer to gather hidden states and router logits, and to scatter the results."""
        if not tokens:
            return 0.0
        gathered = _BYTES * tokens * (self._model.hidden + self._model.experts)
        scattered = _BYTES * tokens * self._model.hidden
        # Either sends what it moves once, where a sum over all devices does so twice.
        return sum(self._link.all_reduce(moved / 2, self._ranks) for moved in (gathered, scattered))

    def _shared_at(self, tokens: int) -> float:
        """Seconds that all layers' experts take for the tokens of all ranks, and the exchange around them."""
        table = self._shared_s
        last = len(table) - 1
        if tokens <= last:
            return self._model.layers * table[tokens]
        return self._model.layers * (table[last] + (tokens - last) * (table[last] - table[last - 1]))
