"""Norms and rotary embeddings between the product for q, k and v and attention, as in `transformers`."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_neighbours
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_halves

from shoal.execute.attention.spec import AttentionSpec, PackedSpec
from shoal.execute.model.record_attention import RecordingStep
from shoal.kvcache import LayerShape

LENGTHS, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = (4, 3), 6, 2, 16, 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [16, 8])
@pytest.mark.parametrize(
    ("interleaved", "rotate"),
    [(False, rotate_halves), (True, rotate_neighbours)],
    ids=["halves", "neighbours"],
)
def test_attend_packed(
    interleaved: bool, rotate: Callable[..., torch.Tensor], count: int, dtype: torch.dtype
) -> None:
    tokens, generator = sum(LENGTHS), torch.Generator().manual_seed(count)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = draw(tokens, HEADS, KEY_DIM), draw(tokens, KV_HEADS, KEY_DIM), draw(tokens, KV_HEADS, VALUE_DIM)
    q, k, v = (part.to(dtype) for part in (q, k, v))
    angles = draw(tokens, count // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q_scale = draw(KEY_DIM)

    def factors(table: torch.Tensor) -> torch.Tensor:
        """Of each element; `transformers` orders them otherwise for neighbours."""
        return table[:, : count // 2].repeat_interleave(2, dim=1) if interleaved else table

    spec = AttentionSpec(scaling=0.3, window=3, softcap=4.0)
    packed = RecordingStep(LENGTHS).attend_packed(
        3,
        torch.cat([part.flatten(1) for part in (q, k, v)], dim=1),
        factors(cos),
        factors(sin),
        PackedSpec(
            heads=HEADS,
            shape=LayerShape(KV_HEADS, KEY_DIM, VALUE_DIM),
            rotary_interleaved=interleaved,
            q_scale=q_scale,
            k_scale=None,
            norm_eps=1e-5,
            attention=spec,
        ),
    )
    q = F.rms_norm(q.float(), (KEY_DIM,), q_scale, 1e-5)
    heads_first = (part.float().transpose(0, 1)[None] for part in (q, k))
    q, k = rotate(*heads_first, cos.float()[None], sin.float()[None])
    plain = RecordingStep(LENGTHS).attend(3, q[0].transpose(0, 1), k[0].transpose(0, 1), v.float(), spec)
    assert packed.shape == (tokens, HEADS * VALUE_DIM)
    error = (packed.float() - plain.flatten(1)).norm() / plain.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 0.01}[dtype]
