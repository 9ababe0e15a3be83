"""Models with random weights, made on the device from a configuration, for measurements without weight files.

A module is built without memory (on the device "meta"), so that its size is known before any is taken. Then
it gets memory on the device, and its tensors are filled in place, one after the other.
"""

from copy import deepcopy
from hashlib import blake2b
from typing import Any

import torch

from shoal.execute.model.checkpoint import refused_if_it_fails
from shoal.execute.model.thread_local_dtype import keep_dtypes_local

DEFAULT_STD = 0.02
"""Of matrices of a model whose configuration names no ``initializer_range``."""
_DRAWN_AT_ONCE = 1 << 24
_SAMPLED = 16


def build_empty(model_class: Any, config: Any, name: str, dtype: torch.dtype, **options: Any) -> Any:
    """The model of ``config`` without memory for its weights.

    model_class: of `transformers`. name: of the model, for the error. options: as for its
    ``from_pretrained``. Raises ModelUnsupported if transformers cannot build it.
    """
    if not isinstance(config, model_class.config_class):  # a multimodal one, of which only the text is made
        config = config.get_text_config()
    keep_dtypes_local()
    with refused_if_it_fails("build", name), torch.device("meta"):
        return model_class._from_config(deepcopy(config), dtype=dtype, **options)


def count_parameters(module: Any) -> int:
    """Numbers in the weights; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def fill(module: Any, name: str, device: torch.device, seed: int) -> None:
    """Give a module of ``build_empty`` its weights, on ``device``.

    Matrices (and experts that are stacked in one tensor) are normally distributed around 0, with the
    configuration's ``initializer_range`` as standard deviation. All else is what the module's own code makes
    of it: norms, biases, buffers such as frequencies of rotations. With one seed, on one kind of device, the
    numbers are the same in each dtype, up to rounding. name: of the model, for the error.
    """
    _take_memory(module, device)
    std = getattr(module.config.get_text_config(), "initializer_range", None) or DEFAULT_STD
    generator = torch.Generator(device).manual_seed(seed)
    # Drawn in float32, as the few digits of shorter numbers make poor logarithms.
    drawn = torch.empty(_DRAWN_AT_ONCE, dtype=torch.float32, device=device)
    with refused_if_it_fails("build", name):
        for parameter in module.parameters():
            if parameter.ndim < 2:
                continue
            for part in parameter.view(-1).split(_DRAWN_AT_ONCE):
                part.copy_(drawn[: len(part)].normal_(0.0, std, generator=generator))
            parameter._is_hf_initialized = True  # so that the next line leaves it alone
        module.initialize_weights()


@torch.no_grad()
def weights_name(module: Any, seed: int) -> str:
    """Names random weights: equal where the weights are.

    A digest of samples is part of it, since one seed gives other numbers on another kind of device.
    """
    samples = torch.cat([parameter.view(-1)[:_SAMPLED].float() for parameter in module.parameters()])
    digest = blake2b(samples.cpu().numpy().tobytes(), digest_size=16).hexdigest()
    return f"random {seed} {digest}"


def _take_memory(module: Any, device: torch.device) -> None:
    """Put zeros on ``device`` in the place of all parameters and buffers; tied weights have them once."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            made[tensor] = torch.zeros_like(tensor, device=device)
        return made[tensor]

    module._apply(zeros)
    module.tie_weights(recompute_mapping=False)
