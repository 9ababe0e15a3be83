"""Names of GGUF tensors for the parameters of a `transformers` model."""

import re
from collections.abc import Iterator
from typing import Any

_EXPERT_TENSORS = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "e_score_correction_bias": ("exp_probs_b.bias",),
}
"""Parameters that consist of several tensors, or that the gguf package has no names for."""
_EXPERTS = re.compile(rf"(?:.*\.)?layers\.(\d+)\.mlp\.({'|'.join(map(re.escape, _EXPERT_TENSORS))})")


def gguf_names(model: Any, architecture: str) -> Iterator[str]:
    """llama.cpp's names of the tensors for all parameters of ``model``."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = model.config.get_text_config().num_hidden_layers
    names = gguf.get_tensor_name_map(numbers[architecture], layers)
    for name in model.state_dict():
        experts = _EXPERTS.fullmatch(name)
        if experts is not None:
            yield from (f"blk.{experts[1]}.{tensor}" for tensor in _EXPERT_TENSORS[experts[2]])
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is not None:
            yield stored
