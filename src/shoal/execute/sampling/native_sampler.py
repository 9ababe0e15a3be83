"""NativeSampler: sampling, grammar masks and log-probabilities by native CPU kernels."""

from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import numpy as np
import torch

from shoal.core import TokenLogprobs, uniform
from shoal.execute.grammar.masks import RowMasks
from shoal.execute.sequences import RunningSequence
from shoal.native import NativeLibrary

_CHOICE = np.dtype(
    [("draw", "f8"), ("top_p", "f8"), ("top_k", "i8"), ("inverse_temperature", "f4"), ("min_p", "f4")]
)
"""``struct choice`` of csrc/kernels/sampling.c."""
_REPORT = np.dtype([("row", "i8"), ("token", "i4"), ("count", "i4")])
"""``struct report`` of csrc/kernels/logprobs.c."""


class NativeSampler:
    """Samples and reports log-probabilities from logits [rows, vocab] on the CPU, in any float dtype."""

    def __init__(self, library: NativeLibrary) -> None:
        self._sample = library.kernel(
            "shoal_sample", c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p
        )
        self._mask = library.kernel(
            "shoal_mask", c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64
        )
        self._report = library.kernel(
            "shoal_logprobs",
            *(c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
        )

    def mask(self, logits: torch.Tensor, masks: RowMasks) -> torch.Tensor:
        """The logits with minus infinity for tokens that masks do not allow; in place if the dtype is
        supported."""
        logits = _readable(logits)
        rows = np.array(masks.rows, dtype=np.int64)
        bits = np.ascontiguousarray(masks.bits)
        self._mask(
            logits.data_ptr(),
            logits.stride(0) * logits.element_size(),
            logits.shape[1],
            logits.dtype == torch.bfloat16,
            *(len(rows), rows.ctypes.data, bits.ctypes.data, bits.shape[1]),
        )
        return logits

    def choose(self, logits: torch.Tensor, rows: Sequence[RunningSequence]) -> list[int]:
        """A token for each row; NO_TOKEN where the logits are not finite."""
        logits = _readable(logits)
        choices = np.array([_choice(row) for row in rows], dtype=_CHOICE)
        tokens = np.empty(len(rows), dtype=np.int32)
        self._sample(
            logits.data_ptr(),
            logits.stride(0) * logits.element_size(),
            *logits.shape,
            logits.dtype == torch.bfloat16,
            choices.ctypes.data,
            tokens.ctypes.data,
        )
        chosen: list[int] = tokens.tolist()
        return chosen

    def report(self, logits: torch.Tensor, queries: Sequence[tuple[int, int, int]]) -> list[TokenLogprobs]:
        """For each (row, token, n) the log-probability of the token, and the n likeliest tokens."""
        logits = _readable(logits)
        vocab = logits.shape[1]
        reports = np.array([(row, token, min(count, vocab)) for row, token, count in queries], dtype=_REPORT)
        most = int(reports["count"].max())
        logprobs = np.empty((len(queries), 1 + most), dtype=np.float32)
        ids = np.empty((len(queries), most), dtype=np.int32)
        self._report(
            logits.data_ptr(),
            logits.stride(0) * logits.element_size(),
            vocab,
            logits.dtype == torch.bfloat16,
            len(queries),
            reports.ctypes.data,
            most,
            logprobs.ctypes.data,
            ids.ctypes.data,
        )
        return [
            TokenLogprobs(token, own, tuple(zip(likeliest[:count], others[:count], strict=True)))
            for (_, token, _), count, likeliest, (own, *others) in zip(
                queries, reports["count"].tolist(), ids.tolist(), logprobs.tolist(), strict=True
            )
        ]


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """The logits in float32 or bfloat16, with contiguous rows, as the kernels read them."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _choice(row: RunningSequence) -> tuple[float, float, int, float, float]:
    params = row.sampling
    if params.greedy:
        return 0.0, 1.0, 0, 0.0, 0.0
    draw = uniform(row.seed, row.output_tokens)
    return draw, params.top_p, max(params.top_k, 0), 1.0 / params.temperature, params.min_p
