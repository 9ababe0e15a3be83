"""Decodes over keys and values that lie anyhow in a pool, for tests of kernels, and their results."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from at_hand import DEVICE
from shoal.execute.attention.kv_views import TORCH_DTYPES, LayerKV

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Largest error of attention by dtype; keys, values and queries are normally distributed."""
BEYOND_INT32 = 2**31
"""Elements after which numbers of 32 bits no longer say where something lies."""


@dataclass(kw_only=True)
class Decodes:
    """Rows that attend with one query each, in a pool where all else is NaN.

    lengths: tokens of each row's sequence. gap: elements of NaN behind the query, key and value of each
    head, and behind those of each token. unused: at least this many elements are between the first entry of
    the pool and the others; they are 0, and on a CPU take no memory. turned: the elements of new rows lie
    apart, and their heads side by side. forgets: the pool has nothing of tokens before the windows.
    """

    lengths: Sequence[int]
    group: int = 2
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    layout: str = "merged"
    window: int | None = None
    softcap: float | None = None
    scaling: float | None = None
    dtype: str = "float32"
    gap: int = 0
    unused: int = 0
    turned: bool = False
    forgets: bool = False
    seed: int = 0
    device: str = DEVICE
    query: torch.Tensor = field(init=False)
    """[rows, heads, key_dim]."""
    pool: torch.Tensor = field(init=False)
    """The memory of all keys and values, flat."""
    kv: LayerKV = field(init=False)
    """Where the keys and values are in it."""
    tables: torch.Tensor = field(init=False)
    """int32 [rows, blocks, entries of a block]; what is not of a row or layer is an entry of NaN."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self._keys = [self._random(generator, length, self.kv_heads, self.key_dim) for length in self.lengths]
        self._values = [
            self._random(generator, length, self.kv_heads, self.value_dim) for length in self.lengths
        ]
        self.query = self._rows(generator, self.group * self.kv_heads, self.key_dim)
        self._place()
        for row, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            visible = slice(self._first_visible(row) if self.forgets else 0, len(keys))
            self._store(row, range(len(keys))[visible], keys[visible], values[visible])

    @property
    def _num_rows(self) -> int:
        return len(self.lengths)

    def _first_visible(self, row: int) -> int:
        """Position of the first token that a row attends."""
        return max(self.lengths[row] - self.window, 0) if self.window else 0

    def _random(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(self.device, TORCH_DTYPES[self.dtype])

    def _rows(self, generator: torch.Generator, heads: int, dim: int) -> torch.Tensor:
        """Elements of each row. Memory ends with the last, as the pool does, so that reading on is an
        error."""
        shape, strides = (self._num_rows, heads, dim), self._strides((heads,), dim)
        if self.turned:
            strides = (heads * dim, 1, heads)
        rows = self._poisoned(_extent(shape, strides)).as_strided(shape, strides)
        return rows.copy_(self._random(generator, *shape))

    def _poisoned(self, elements: int) -> torch.Tensor:
        return torch.full((elements,), torch.nan, dtype=TORCH_DTYPES[self.dtype], device=self.device)

    def _place(self) -> None:
        """Make the pool and the tables: entry 0 belongs to no sequence, all others do."""
        split = self.layout == "split"
        heads, first, taken = ((), 1, self.kv_heads) if split else ((self.kv_heads,), 0, 1)
        blocks = [-(-length // self.block_size) for length in self.lengths]
        key_strides, value_strides = self._strides(heads, self.key_dim), self._strides(heads, self.value_dim)
        values_at = self.block_size * key_strides[0]
        stride = values_at + self.block_size * value_strides[0] + self.gap
        skipped = 1 - (-self.unused // stride)
        shape = (skipped + sum(blocks) * taken, self.block_size, *heads)
        value_shape = (*shape, self.value_dim)
        self.pool = self._pool(values_at + _extent(value_shape, (stride, *value_strides)), stride, skipped)
        self._used = self.pool[skipped * stride if self.unused else 0 :]
        self.kv = LayerKV(
            self.pool.as_strided((*shape, self.key_dim), (stride, *key_strides)),
            self.pool.as_strided(value_shape, (stride, *value_strides), values_at),
            self.kv_heads,
            key_head=0 if split else key_strides[1],
            value_head=0 if split else value_strides[1],
            first_entry=first,
            head_entry=1 if split else 0,
        )
        # One column more than needed, as in the tables of captured steps.
        tables = np.zeros((len(blocks), max(blocks) + 1, first + taken), dtype=np.int32)
        numbers = skipped + np.random.default_rng(self.seed).permutation(sum(blocks) * taken)
        for row, count in enumerate(blocks):
            mine, numbers = np.split(numbers, [count * taken])
            tables[row, :count, first:] = mine.reshape(count, taken)
        self.tables = torch.from_numpy(tables).to(self.device)[:, :-1]

    def _pool(self, elements: int, stride: int, skipped: int) -> torch.Tensor:
        """NaN, but for what lies between entry 0 and entry ``skipped``."""
        if skipped == 1:
            return self._poisoned(elements)
        pool = _sparse(elements, TORCH_DTYPES[self.dtype], self.device)
        pool[:stride] = pool[skipped * stride :] = torch.nan
        return pool

    def _strides(self, heads: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """Of tokens, of heads if they have no entries of their own, and of elements."""
        one = dim + self.gap
        return (heads[0] * one + self.gap, one, 1) if heads else (one, 1)

    def _store(self, row: int, at: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        positions = torch.tensor(at, dtype=torch.int64, device=self.device)
        entries = self.tables[row, positions // self.block_size].long()[:, self.kv.first_entry :]
        row_indices = (entries[:, 0], positions % self.block_size)
        if self.layout == "split":
            row_indices = (entries, (positions % self.block_size)[:, None])
        self.kv.keys[row_indices] = keys
        self.kv.values[row_indices] = values

    def expected(self) -> torch.Tensor:
        """What the formulas say, in float64; 0 of rows without tokens."""
        scaling = self.scaling if self.scaling is not None else self.key_dim**-0.5
        out = torch.zeros((*self.query.shape[:2], self.value_dim), dtype=torch.float64, device=self.device)
        for row, length in enumerate(self.lengths):
            visible = slice(self._first_visible(row), length)
            k, v = (
                x[visible].double().repeat_interleave(self.group, dim=1)
                for x in (self._keys[row], self._values[row])
            )
            scores = torch.einsum("hd,khd->hk", self.query[row].double(), k) * scaling
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
        return out

    def in_other_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables with two more rows, in another order; and int32 [rows], the row of each of ``tables``.

        Elsewhere they have -1, where the pool has nothing.
        """
        rows = len(self.lengths)
        order = torch.randperm(rows + 2, generator=torch.Generator().manual_seed(self.seed))[:rows]
        shape = (rows + 2, *self.tables.shape[1:])
        tables = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        tables[order.to(self.device)] = self.tables
        return tables, order.to(self.device, torch.int32)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))


def _sparse(elements: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros; on a CPU only what is written takes memory. Raises OSError where that cannot be."""
    if device != "cpu":
        return torch.zeros(elements, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)
