"""A KV pool with sequences on a device, for the attention parts of `benchmarks.gpu_check`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.execute.attention.kv_buffers import KVStore
from shoal.execute.attention.kv_views import TORCH_DTYPES
from shoal.execute.attention.spec import AttentionSpec
from shoal.execute.attention.torch_backends import PagedAttention
from shoal.execute.batch import StepBatch
from shoal.kvcache import BlockPool, KVShape, LayerShape, plan_layout

BLOCK = 16
_SERVICE = "a"
_NAN_BYTE = 0xFF
"""Makes numbers of any float dtype NaN."""
_PATTERN = 1 << 26

Row = tuple[int, int]
"""A row of a step: computes tokens [first, end) of its sequence."""


@dataclass(frozen=True)
class Heads:
    """Attention shape of a known model."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    softcap: float | None = None


class Pool:
    """A pool with a sequence for each row of a step, in scattered blocks.

    layers: of a block. spare_bytes: unused bytes before all blocks of sequences.
    """

    def __init__(
        self,
        heads: Heads,
        rows: Sequence[Row],
        dtype: str,
        device: str,
        *,
        layers: int,
        layout: str = "merged",
        spare_bytes: int = 0,
    ) -> None:
        self.heads, self.rows, self.device = heads, rows, device
        self.dtype = TORCH_DTYPES[dtype]
        self._spec = AttentionSpec(window=heads.window, softcap=heads.softcap)
        kv = kv_shape(heads, dtype, layers)
        needed = [blocks_of(end) for _, end in rows]
        memory_bytes = pool_bytes(heads, rows, dtype, layers) + spare_bytes
        plan = plan_layout({_SERVICE: kv}, memory_bytes=memory_bytes, block_size=BLOCK, kind=layout)
        blocks = BlockPool(plan)
        store = KVStore(plan, torch.device(device), blocks.unit_ids if layout == "split" else None)
        self.buffer = store.buffer
        self.cache = store.services[_SERVICE]
        free = blocks.allocate(_SERVICE, blocks.max_blocks(_SERVICE))
        assert free is not None
        order = np.random.default_rng(0).permutation(sorted(free)[-sum(needed) :])
        self._tables = np.split(order, np.cumsum(needed)[:-1])

    def fill_with_nan(self) -> None:
        """Reads of unwritten KV then give NaN."""
        self.buffer.fill_(_NAN_BYTE)

    def fill_with_numbers(self) -> None:
        """Fill with a repeated pattern of normal numbers."""
        numbers = self.buffer[: self.buffer.numel() // self.dtype.itemsize * self.dtype.itemsize].view(
            self.dtype
        )
        pattern = torch.randn(min(_PATTERN, numbers.numel()), device=self.device).to(self.dtype)
        for start in range(0, numbers.numel(), pattern.numel()):
            part = numbers[start : start + pattern.numel()]
            part.copy_(pattern[: part.numel()])

    def random(self, heads: int, tokens: int, seed: int) -> torch.Tensor:
        """Queries, keys or values [tokens, heads, dim]."""
        generator = torch.Generator().manual_seed(seed)
        made = torch.randn((tokens, heads, self.heads.dim), generator=generator)
        return made.to(self.device, self.dtype)

    def batch(self) -> StepBatch:
        """The step of all rows, which must be decodes by falling length, then prompts."""
        width = max(blocks_of(end) for _, end in self.rows)
        tables = np.repeat([[table[0]] for table in self._tables], width, axis=1)
        for row, table in enumerate(self._tables):
            tables[row, : len(table)] = table
        starts = np.cumsum([0, *(end - first for first, end in self.rows)])
        positions = torch.cat([torch.arange(first, end) for first, end in self.rows])[None].to(self.device)
        return StepBatch(
            input_ids=torch.zeros_like(positions),
            positions=positions,
            starts=starts,
            firsts=np.array([first for first, _ in self.rows]),
            tables=tables,
            last=starts[1:] - 1,
        )

    def store(self, layer: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Write the KV before each row's first token; keys, values: of whole sequences."""
        for table, (first, _), key, value in zip(self._tables, self.rows, keys, values, strict=True):
            if first:
                at = np.arange(first)
                index = self.cache.index(table[at // BLOCK])
                offsets = torch.from_numpy(at % BLOCK).to(self.device)
                self.cache.write(layer, index, offsets, key[:first], value[:first])

    def attend(
        self, step: PagedAttention, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return step.attend(layer, query, key, value, self._spec)


def kv_shape(heads: Heads, dtype: str, layers: int) -> KVShape:
    return KVShape(dtype, (LayerShape(heads.kv_heads, heads.dim, heads.dim),) * layers)


def pool_bytes(heads: Heads, rows: Sequence[Row], dtype: str, layers: int) -> int:
    """Bytes of a pool that is just large enough."""
    block_bytes = kv_shape(heads, dtype, layers).block_bytes(BLOCK)
    # Units of the split layout, or whole blocks, are padded to multiples of 256 bytes.
    return (1 + sum(blocks_of(end) for _, end in rows)) * (block_bytes + 256 * heads.kv_heads * layers)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)
