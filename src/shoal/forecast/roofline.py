"""Roofline step-time model: from a model's shape and a device's data sheet, with measured efficiencies.

For devices without a profile; ``ProfileTimes`` is more accurate. Tensor parallelism splits every matrix and
the heads evenly, and adds the time of collectives.
"""

from functools import partial

import numpy as np

from shoal.core import ConfigError
from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.latency import FloatArray
from shoal.forecast.model_spec import ModelSpec
from shoal.forecast.roofline_ops import Link
from shoal.forecast.step_times import StepRows
from shoal.forecast.tensor_parallel import CollectiveTimes

_ACTIVATION_BYTES = 2
_LOGIT_BYTES = 4


class RooflineTimes:
    """Step times of ``model`` on ``tp`` devices of one kind."""

    def __init__(
        self, model: ModelSpec, device: DeviceSpec, tp: int = 1, *, link: Link | None = None
    ) -> None:
        """link: between devices; None: that of the data sheet.

        Raises ConfigError if the heads cannot be split over ``tp`` devices.
        """
        if tp < 1 or model.heads % tp:
            raise ConfigError(f"{model.name} has {model.heads} heads, which tp={tp} does not divide")
        self.model, self.device, self.tp = model, device, tp
        self._collectives = CollectiveTimes(model, partial((link or device.link).all_reduce, devices=tp))
        self._heads = model.heads // tp
        self._kv_heads = model.kv_heads_on(tp)
        position = 2 * self._kv_heads * model.head_dim * model.kv_bytes_each
        decode = device.efficiencies.decode
        self._per_context = model.layers * position / (device.bandwidth * decode.memory)
        self._per_decode = model.layers * decode.row_s
        self._by_tokens: dict[int, float] = {}
        self._by_sampled: dict[int, float] = {}

    def step_time(self, rows: StepRows) -> float:
        seconds = self._base(rows.new_tokens, rows.sampled, rows.decodes)
        seconds = seconds + self._per_context * rows.decode_context
        return seconds + self._prefill_attention(rows.chunks) if rows.chunks else seconds

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        contexts = np.arange(context, context + sequences * steps, sequences, dtype=np.int64)
        seconds = np.asarray(self._per_context * contexts, dtype=np.float64)
        return self._base(sequences, sequences, sequences) + seconds

    def _base(self, tokens: int, sampled: int, decodes: int) -> float:
        """Seconds of a step without reading the KV of decoding rows and without the attention of chunks."""
        by_tokens = self._by_tokens.get(tokens)
        if by_tokens is None:
            by_tokens = self._by_tokens[tokens] = self._layers(tokens)
        by_sampled = self._by_sampled.get(sampled)
        if by_sampled is None:
            by_sampled = self._by_sampled[sampled] = self._head(sampled)
        return by_tokens + by_sampled + self._per_decode * decodes

    def _layers(self, tokens: int) -> float:
        """Seconds of all layers, without the parts that depend on contexts."""
        model, device = self.model, self.device
        heads = (self._heads + 2 * self._kv_heads) * model.head_dim
        layer = self._matmul(tokens, model.hidden, heads)
        layer += self._matmul(tokens, self._heads * model.head_dim, model.hidden)
        layer += self._experts(tokens) if model.experts else self._mlp(tokens)
        layer += self._pointwise(tokens)
        layer += device.efficiencies.decode.start_s
        layer += self._collectives.layer_s(tokens)
        return model.layers * layer

    def _matmul(self, tokens: int, inputs: int, outputs: float) -> float:
        """Seconds of [tokens, inputs] x [inputs, outputs]."""
        weights = inputs * outputs * self.model.weight_bytes_each
        activations = tokens * (inputs + outputs) * _ACTIVATION_BYTES
        return self.device.efficiencies.matmul.seconds(
            2.0 * tokens * inputs * outputs, weights + activations, self.device.flops, self.device.bandwidth
        )

    def _mlp(self, tokens: int) -> float:
        model = self.model
        width = model.intermediate / self.tp
        up = self._matmul(tokens, model.hidden, (model.mlp_matrices - 1) * width)
        return up + self._matmul(tokens, model.hidden, width)

    def _experts(self, tokens: int) -> float:
        """Seconds of a mixture-of-experts MLP, for tokens that choose experts independently and evenly."""
        model = self.model
        numbers = model.mlp_matrices * model.hidden * model.intermediate / self.tp
        active = expected_active_experts(model.experts, model.experts_per_token, tokens)
        rows = tokens * model.experts_per_token
        moved = active * numbers * model.weight_bytes_each + 2 * rows * model.hidden * _ACTIVATION_BYTES
        return self.device.efficiencies.experts.seconds(
            2.0 * rows * numbers, moved, self.device.flops, self.device.bandwidth
        )

    def _pointwise(self, tokens: int) -> float:
        """Seconds of a layer's norms, rotary embedding and activation; the norms are not split."""
        model = self.model
        norms = 8 * model.hidden
        rotary = 2 * (self._heads + self._kv_heads) * model.head_dim
        rows = model.experts_per_token or 1
        activation = model.mlp_matrices * rows * model.intermediate / self.tp
        moved = tokens * (norms + rotary + activation) * _ACTIVATION_BYTES
        pointwise = self.device.efficiencies.pointwise
        return pointwise.seconds(0.0, moved, self.device.flops, self.device.bandwidth) + 3 * pointwise.start_s

    def _head(self, sampled: int) -> float:
        """Seconds of logits and sampling for ``sampled`` rows."""
        if not sampled:
            return 0.0
        model, device = self.model, self.device
        logits = self._matmul(sampled, model.hidden, model.vocab / self.tp)
        choice = device.efficiencies.pointwise.seconds(
            0.0, 2 * sampled * model.vocab * _LOGIT_BYTES, device.flops, device.bandwidth
        )
        return logits + self._collectives.logits_s(sampled) + choice

    def _prefill_attention(self, chunks: tuple[tuple[int, int], ...]) -> float:
        """Seconds of all layers' attention for the prompt chunks of one step."""
        model, device = self.model, self.device
        pairs = positions = tokens = 0
        for count, before in chunks:
            pairs += count * before + count * (count + 1) // 2
            positions += before + count
            tokens += count
        moved = 2.0 * tokens * self._heads * model.head_dim * _ACTIVATION_BYTES
        moved += 2 * positions * self._kv_heads * model.head_dim * model.kv_bytes_each
        prefill = device.efficiencies.prefill
        layer = prefill.seconds(
            4.0 * pairs * self._heads * model.head_dim, moved, device.flops, device.bandwidth
        )
        return model.layers * (layer - prefill.start_s + len(chunks) * prefill.row_s)


def expected_active_experts(experts: int, per_token: int, tokens: int) -> float:
    """Expected number of experts activated by ``tokens`` that each choose ``per_token`` evenly."""
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens)


def kv_tokens(model: ModelSpec, device: DeviceSpec, tp: int = 1, utilisation: float = 0.9) -> int:
    """Tokens of KV that fit with the weights into a share ``utilisation`` of each device's memory.

    Raises ConfigError if the weights do not fit.
    """
    room = int(device.memory_bytes * utilisation) - model.weight_bytes(tp)
    if room <= 0:
        raise ConfigError(
            f"{model.name} needs {model.weight_bytes(tp) / 2**30:.1f} GiB on each of {tp} {device.name}, of "
            f"which {device.memory_bytes * utilisation / 2**30:.1f} GiB may be used; raise tp"
        )
    return room // model.kv_bytes_per_token(tp)
