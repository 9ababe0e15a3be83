"""Replacing modules of a model: a rule says what replaces a module, and the originals can be put back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model has a module."""

    path: str
    """From the model, as in ``named_modules``."""
    parent: nn.Module
    name: str
    """Attribute of ``parent``."""

    @property
    def module(self) -> Any:
        """The module that is there now."""
        return getattr(self.parent, self.name)

    def put(self, module: nn.Module) -> None:
        setattr(self.parent, self.name, module)


Rule = Callable[[Place], nn.Module | None]
"""Gives the replacement of the module at a place; None if it stays."""


def places(model: nn.Module) -> list[Place]:
    """Places of all modules but the model itself; a module is behind those that contain it."""
    return [
        Place(f"{path}.{name}".removeprefix("."), parent, name)
        for path, parent in model.named_modules()
        for name, _ in parent.named_children()
    ]


@torch.inference_mode()
def replace_modules(model: nn.Module, rule: Rule) -> dict[Place, nn.Module]:
    """Replace modules as ``rule`` says, also in modules that are replaced; returns the originals."""
    originals = {}
    for place in places(model):
        original, replacement = place.module, rule(place)
        if replacement is not None:
            place.put(replacement)
            originals[place] = original
    return originals


def put_back(originals: Mapping[Place, nn.Module]) -> None:
    """Undo what ``replace_modules`` did."""
    for place, original in originals.items():
        place.put(original)
