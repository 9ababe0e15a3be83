"""Sequences in a KV pool, and steps over them, for tests of attention backends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from at_hand import DEVICE
from shoal.execute.attention.kv_buffers import KVStore
from shoal.execute.attention.kv_views import TORCH_DTYPES, ServiceCache
from shoal.execute.attention.spec import AttentionSpec
from shoal.execute.attention.torch_backends import GatheringAttention, PagedAttention
from shoal.execute.batch import StepBatch
from shoal.kvcache import BlockPool, KVShape, LayerShape, plan_layout


@dataclass(kw_only=True)
class Shape:
    """Of attention, in all layers."""

    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    scaling: float | None = None
    dtype: str = "float32"
    int8: bool = False

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.scaling, self.window, self.softcap)

    @property
    def layer_shape(self) -> LayerShape:
        return LayerShape(self.kv_heads, self.key_dim, self.value_dim)


@dataclass
class Sequences:
    """Random queries, keys and values of some sequences, and room for them in a pool full of NaN."""

    shape: Shape
    lengths: Sequence[int]
    layout: str = "merged"
    block_size: int = 4
    layers: int = 1
    seed: int = 0
    cache: ServiceCache = field(init=False)
    tables: list[list[int]] = field(init=False)
    queries: list[torch.Tensor] = field(init=False)
    keys: list[torch.Tensor] = field(init=False)
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        shape, size = self.shape, self.block_size
        kv = KVShape(shape.dtype, (shape.layer_shape,) * self.layers, int8=shape.int8)
        blocks = sum(-(-length // size) for length in self.lengths)
        # Padding to a multiple of 256 bytes: a unit or a block in the worst case.
        memory_bytes = (blocks + 1) * (kv.block_bytes(size) + 256 * shape.kv_heads * self.layers)
        layout = plan_layout({"a": kv}, memory_bytes=memory_bytes, block_size=size, kind=self.layout)
        pool = BlockPool(layout)
        store = KVStore(layout, torch.device(DEVICE), pool.unit_ids if self.layout == "split" else None)
        store.buffer.fill_(0xFF)
        self.cache = store.services["a"]
        taken = pool.allocate("a", blocks)
        assert taken is not None
        order = np.random.default_rng(self.seed).permutation(taken).tolist()
        self.tables = []
        for length in self.lengths:
            self.tables.append([order.pop() for _ in range(-(-length // size))])
        generator = torch.Generator().manual_seed(self.seed)
        self.queries = self._random(generator, shape.heads, shape.key_dim)
        self.keys = self._random(generator, shape.kv_heads, shape.key_dim)
        self.values = self._random(generator, shape.kv_heads, shape.value_dim)

    def _random(self, generator: torch.Generator, heads: int, dim: int) -> list[torch.Tensor]:
        dtype = TORCH_DTYPES[self.shape.dtype]
        return [torch.randn((n, heads, dim), generator=generator).to(DEVICE, dtype) for n in self.lengths]

    def step(self, rows: Sequence[tuple[int, int, int]]) -> StepBatch:
        """A step that computes tokens [first, end) of sequences: rows of (sequence, first, end)."""
        width = max(-(-end // self.block_size) for _, _, end in rows)
        tables = np.zeros((len(rows), width), dtype=np.int64)
        for row, (sequence, _, _) in enumerate(rows):
            known = self.tables[sequence][:width]
            tables[row, : len(known)] = known
        starts = np.cumsum([0, *(end - first for _, first, end in rows)])
        positions = torch.cat([torch.arange(first, end) for _, first, end in rows])
        return StepBatch(
            input_ids=torch.zeros_like(positions, device=DEVICE)[None],
            positions=positions[None].to(DEVICE),
            starts=starts,
            firsts=np.array([first for _, first, _ in rows]),
            tables=tables,
            last=starts[1:] - 1,
        )

    def of_step(self, tensors: Sequence[torch.Tensor], rows: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Queries, keys or values of a step over ``rows``."""
        return torch.cat([tensors[sequence][first:end] for sequence, first, end in rows])

    def attend(
        self, step: PagedAttention, rows: Sequence[tuple[int, int, int]], layer: int = 0
    ) -> torch.Tensor:
        """The attention of a step over ``rows``."""
        query, key, value = (self.of_step(each, rows) for each in (self.queries, self.keys, self.values))
        return step.attend(layer, query, key, value, self.shape.spec)

    def store(self, ends: Sequence[int], layer: int = 0) -> None:
        """Store keys and values of each sequence's first tokens in the pool."""
        rows = [(sequence, 0, end) for sequence, end in enumerate(ends) if end]
        if rows:
            key, value = (self.of_step(each, rows) for each in (self.keys, self.values))
            _WritingStep(self.step(rows), self.cache).write(layer, key, value)


class _WritingStep(GatheringAttention):
    """Only writes."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.cache.write(layer, self._new_index, self._new_offsets, key, value)

    def _attend_rows(self, *arguments: object) -> list[torch.Tensor]:
        raise NotImplementedError
