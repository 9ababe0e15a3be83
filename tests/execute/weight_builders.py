"""Weight images of tiny models and of single tensors, made within the test's process, and fetches of them."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from shoal.core import Arrival, StepPlan
from shoal.execute.model.loading import LoadedModel
from shoal.execute.protocol import Executor
from shoal.execute.weights.image import ImageOrigin, WeightImage, open_image, write_image
from shoal.execute.weights.loader import WeightLoader
from shoal.execute.weights.skeleton import take_apart

AMPLE = 1 << 30
"""Memory for all weights of a test."""


def tensor_image(folder: Path, tensor: torch.Tensor) -> tuple[torch.Tensor, WeightImage]:
    """An image that has one tensor and nothing else; its tensor is returned, too."""
    folder.mkdir()
    write_image(take_apart(tensor), folder, ImageOrigin(folder, "1"))
    return open_image(folder, "1")


def image_of(model: LoadedModel) -> WeightImage:
    assert model.image is not None
    return model.image


def moves(service: str, *, evict: Sequence[str] = (), fetch: Sequence[str] = ()) -> StepPlan:
    """A plan that only moves weights."""
    return StepPlan(
        number=0,
        service=service,
        seq_ids=(),
        new_tokens=(),
        sampled=(),
        evict=tuple(evict),
        fetch=tuple(fetch),
    )


def next_arrival(source: Executor | WeightLoader) -> Arrival:
    """Wait for the next arrival, which must be the only one."""
    while not (arrivals := source.arrivals()):
        time.sleep(0.001)
    [arrival] = arrivals
    return arrival
