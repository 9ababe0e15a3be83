"""Models with random weights, from a configuration alone, for measurements without weight files.

A module is built on torch's device "meta", so that its size is known before memory is allocated. Then memory
is allocated on the device and filled in place, tensor by tensor.
"""

from copy import deepcopy
from hashlib import blake2b
from typing import Any

import torch

from shoal.execute.model.checkpoint import unsupported_on_error
from shoal.execute.model.thread_local_dtype import keep_dtypes_local

DEFAULT_STD = 0.02
"""Standard deviation of matrices if the configuration has no ``initializer_range``."""
_MAX_DRAWN = 1 << 24
_SAMPLES = 16


def build_empty(model_class: Any, config: Any, name: str, dtype: torch.dtype, **options: Any) -> Any:
    """The model of ``config`` on the device "meta".

    model_class: of `transformers`. name: name of the model, for errors. options: as for its
    ``from_pretrained``. Raises ModelUnsupported if transformers cannot build it.
    """
    if not isinstance(config, model_class.config_class):  # multimodal: only its text model is built
        config = config.get_text_config()
    keep_dtypes_local()
    with unsupported_on_error("build", name), torch.device("meta"):
        return model_class._from_config(deepcopy(config), dtype=dtype, **options)


def count_parameters(module: Any) -> int:
    """Number of parameters; tied weights count once."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def fill(module: Any, name: str, device: torch.device, seed: int) -> None:
    """Give a module of ``build_empty`` its weights, on ``device``.

    Matrices (and experts stacked in one tensor) are normally distributed around 0, with the configuration's
    ``initializer_range`` as standard deviation. The module's own code initialises the rest: norms, biases,
    buffers such as rotary frequencies. For a seed and kind of device, the numbers are the same in every
    dtype, up to rounding. name: name of the model, for errors.
    """
    _allocate(module, device)
    std = getattr(module.config.get_text_config(), "initializer_range", None) or DEFAULT_STD
    generator = torch.Generator(device).manual_seed(seed)
    # Drawn in float32, since normal numbers drawn in shorter dtypes are poorly distributed.
    drawn = torch.empty(_MAX_DRAWN, dtype=torch.float32, device=device)
    with unsupported_on_error("build", name):
        for parameter in module.parameters():
            if parameter.ndim < 2:
                continue
            for part in parameter.view(-1).split(_MAX_DRAWN):
                part.copy_(drawn[: len(part)].normal_(0.0, std, generator=generator))
            parameter._is_hf_initialized = True  # so that initialize_weights skips it
        module.initialize_weights()


@torch.no_grad()
def weights_name(module: Any, seed: int) -> str:
    """An identifier of random weights, equal if the weights are.

    It contains a digest of samples, since a seed gives different numbers on different kinds of devices.
    """
    samples = torch.cat([parameter.view(-1)[:_SAMPLES].float() for parameter in module.parameters()])
    digest = blake2b(samples.cpu().numpy().tobytes(), digest_size=16).hexdigest()
    return f"random {seed} {digest}"


def _allocate(module: Any, device: torch.device) -> None:
    """Allocate zeros on ``device`` for all parameters and buffers; once for tied weights."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            made[tensor] = torch.zeros_like(tensor, device=device)
        return made[tensor]

    module._apply(zeros)
    module.tie_weights(recompute_mapping=False)
