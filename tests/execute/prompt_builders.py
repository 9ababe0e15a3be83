"""Prompts behind a context, over keys and values that lie anyhow in a pool, for tests of kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from kernel_builders import Decodes


@dataclass(kw_only=True)
class Prompts(Decodes):
    """Rows that attend with the queries of all tokens from ``firsts`` on; ``query`` is [tokens, heads, dim].

    Keys and values of all tokens that are attended are in the pool.
    """

    firsts: Sequence[int]

    @property
    def starts(self) -> np.ndarray:
        """[rows + 1]: index of each row's first token in ``query``, and their number."""
        counts = [end - first for first, end in zip(self.firsts, self.lengths, strict=True)]
        return np.cumsum([0, *counts])

    @property
    def _num_rows(self) -> int:
        return int(self.starts[-1])

    def _first_visible(self, row: int) -> int:
        return max(self.firsts[row] - self.window + 1, 0) if self.window else 0

    def expected(self) -> torch.Tensor:
        """What the formulas say, in float64."""
        scaling = self.scaling if self.scaling is not None else self.key_dim**-0.5
        parts = [torch.empty(0, self.query.shape[1], self.value_dim, dtype=torch.float64, device=self.device)]
        for row, (first, end) in enumerate(zip(self.firsts, self.lengths, strict=True)):
            k, v = (
                x.double().repeat_interleave(self.group, dim=1) for x in (self._keys[row], self._values[row])
            )
            query = self.query[self.starts[row] : self.starts[row + 1]].double()
            scores = torch.einsum("qhd,khd->hqk", query, k) * scaling
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            q_at = torch.arange(first, end, device=self.device)[:, None]
            k_at = torch.arange(end, device=self.device)
            hidden = (k_at > q_at) | (k_at <= q_at - (self.window or end))
            parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
        return torch.cat(parts)
