"""Triton's kernels norm, rotate and store new tokens as torch's operations do, wherever the pool has them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from execute_builders import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_builders import BEYOND_INT32, Decodes
from strict_interpreter import strict_interpreter

from at_hand import DEVICE
from hypothesis_profiles import examples
from shoal.execute.attention.kv_views import TORCH_DTYPES
from shoal.execute.attention.packed_qkv import PackedQKV
from shoal.execute.attention.spec import AttentionSpec, PackedSpec
from shoal.kvcache import LayerShape

pytestmark = needs_triton

TOLERANCE = {"float32": 5e-6, "float16": 0.02, "bfloat16": 0.15}
"""Largest difference of normed elements, which are at most about 16: some are rounded otherwise."""
# Triton's interpreter does not round to bfloat16, it cuts off.
DTYPES = ["float32", "float16"] if DEVICE == "cpu" else list(TOLERANCE)
LAYOUTS = pytest.mark.parametrize("layout", ["merged", "split"])


@pytest.fixture(scope="module", autouse=True)
def _strict() -> Iterator[None]:
    if DEVICE != "cpu":
        yield
        return
    with strict_interpreter():
        yield


@dataclass(kw_only=True)
class NewTokens(Decodes):
    """New tokens of the sequences.

    chunk: most new tokens of a sequence. padding: rows without a sequence, which are among them. rotated:
    share of a key's elements. angles: dtype of cosines and sines.
    """

    chunk: int = 3
    padding: int = 0
    rotated: float = 1.0
    interleaved: bool = False
    q_norm: bool = False
    k_norm: bool = False
    angles: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.generator = torch.Generator().manual_seed(self.seed + 1)
        tokens = [
            (row, at)
            for row, length in enumerate(self.lengths)
            for at in range(max(0, length - self.chunk), length)
        ]
        tokens += [(-1, at) for at in range(-1, self.padding - 1)]
        order = torch.randperm(len(tokens), generator=self.generator).tolist()
        self.tokens = [tokens[at] for at in order]
        rows, positions = ([token[part] for token in self.tokens] for part in (0, 1))
        self.table_rows = torch.tensor(rows, dtype=torch.int32, device=self.device)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=self.device)

    def check_rotated(self) -> None:
        """Raises AssertionError if queries or the pool are not as torch's operations make them."""
        from shoal.execute.gpu.kernels.store import rotate_and_store

        heads, count = self.group * self.kv_heads, int(self.key_dim * self.rotated) // 2 * 2
        columns = (heads + self.kv_heads) * self.key_dim + self.kv_heads * self.value_dim
        row = columns + self.gap
        qkv = self._poisoned(len(self.tokens) * row).view(-1, row)[:, :columns]
        qkv.copy_(self._random(self.generator, *qkv.shape))
        cos, sin = (
            torch.randn((len(self.tokens), count), generator=self.generator)
            .cos()
            .to(self.device, TORCH_DTYPES[self.angles])
            for _ in range(2)
        )
        scales = torch.randn((2, self.key_dim), generator=self.generator).to(self.device)
        arguments: dict[str, Any] = {
            "heads": heads,
            "cos": cos,
            "sin": sin,
            "rotary_interleaved": self.interleaved,
            "q_scale": scales[0] if self.q_norm else None,
            "k_scale": scales[1] if self.k_norm else None,
            "norm_eps": 1e-5,
        }
        given_qkv = qkv.clone()
        shape = LayerShape(self.kv_heads, self.key_dim, self.value_dim)
        query, key, value = _torch_step(qkv, shape, **arguments)
        before = self._used.clone()
        ours = rotate_and_store(qkv, self.kv, self.tables, self.table_rows, self.positions, **arguments)
        assert torch.equal(qkv, given_qkv)
        torch.testing.assert_close(ours, query, rtol=0, atol=TOLERANCE[self.dtype] if self.q_norm else 0.0)
        self.check_pool(before, key, value, TOLERANCE[self.dtype] if self.k_norm else 0.0)

    def check_stored(self) -> None:
        """The same of tokens that are rotated already, of any strides."""
        from shoal.execute.gpu.kernels.store import store

        key, value = (
            self._strided(len(self.tokens), self.kv_heads, dim) for dim in (self.key_dim, self.value_dim)
        )
        before = self._used.clone()
        store(key, value, self.kv, self.tables, self.table_rows, self.positions)
        self.check_pool(before, key, value, 0.0)

    def check_pool(self, before: torch.Tensor, key: torch.Tensor, value: torch.Tensor, error: float) -> None:
        """Only the new tokens have changed, to these keys and values."""
        stored = self._used.clone()
        self._used.copy_(before)
        for token, (row, at) in enumerate(self.tokens):
            if row >= 0:
                self._store(row, [at], key[token : token + 1], value[token : token + 1])
        torch.testing.assert_close(stored, self._used, rtol=0, atol=error, equal_nan=True)

    def _strided(self, *shape: int) -> torch.Tensor:
        """Turned: heads first, as most models of `transformers` have them, and elements apart."""
        x = self._random(self.generator, *shape)
        if self.turned:
            return x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        return torch.nn.functional.pad(x, (0, self.gap), value=torch.nan)[..., : shape[-1]]


def _torch_step(
    qkv: torch.Tensor, shape: LayerShape, cos: torch.Tensor, sin: torch.Tensor, **arguments: Any
) -> list[torch.Tensor]:
    """Query, key and value as ``attend`` gets them from torch's operations."""
    found: list[torch.Tensor] = []

    class Step(PackedQKV):
        def attend(
            self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
        ) -> torch.Tensor:
            found.extend((query, key, value))
            return query.new_zeros((*query.shape[:2], shape.value_dim))

    Step().attend_packed(0, qkv, cos, sin, PackedSpec(shape=shape, attention=AttentionSpec(), **arguments))
    return found


def new_tokens(layout: str) -> st.SearchStrategy[NewTokens]:
    dims = st.sampled_from([8, 16, 33, 64, 72, 80, 96, 128, 256])
    return st.builds(
        NewTokens,
        lengths=st.lists(st.sampled_from([1, 2, 15, 16, 17, 40]), min_size=1, max_size=3),
        chunk=st.sampled_from([1, 3, 5]),
        padding=st.sampled_from([0, 0, 1, 3]),
        group=st.sampled_from([1, 2, 3, 7, 8]),
        kv_heads=st.sampled_from([1, 2, 3, 5]),
        key_dim=dims,
        value_dim=dims,
        block_size=st.sampled_from([1, 3, 16]),
        layout=st.just(layout),
        rotated=st.sampled_from([1.0, 1.0, 0.5, 0.25]),
        interleaved=st.booleans(),
        q_norm=st.booleans(),
        k_norm=st.booleans(),
        dtype=st.sampled_from(DTYPES),
        angles=st.sampled_from(DTYPES),
        gap=st.sampled_from([0, 1, 8]),
        turned=st.booleans(),
        seed=st.integers(0, 3),
    )


@LAYOUTS
@settings(max_examples=examples(50), deadline=None)
@given(data=st.data())
def test_queries_and_keys_are_normed_and_rotated(layout: str, data: st.DataObject) -> None:
    data.draw(new_tokens(layout)).check_rotated()


@LAYOUTS
@settings(max_examples=examples(50), deadline=None)
@given(data=st.data())
def test_rotated_tokens_are_stored(layout: str, data: st.DataObject) -> None:
    data.draw(new_tokens(layout)).check_stored()


@LAYOUTS
def test_offsets_may_exceed_32_bits(layout: str) -> None:
    try:
        case = NewTokens(lengths=[20, 5], padding=2, layout=layout, dtype="float16", unused=BEYOND_INT32)
    except (OSError, torch.OutOfMemoryError) as error:
        pytest.skip(f"there is no room for so large a pool: {error}")
    case.check_rotated()
    case.check_stored()


@pytest.mark.parametrize("padding", [0, 3])
def test_no_tokens_or_only_padding(padding: int) -> None:
    case = NewTokens(lengths=[3], chunk=0, padding=padding)
    case.check_rotated()
    case.check_stored()
