"""Putting other modules in the place of a model's own, and back."""

from dataclasses import dataclass, field

from torch import nn


@dataclass(slots=True)
class Replacements:
    """Modules that were replaced; keeps the originals until it is dropped."""

    done: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)

    def put(self, parent: nn.Module, name: str, original: nn.Module, other: nn.Module) -> None:
        """Put ``other`` where ``parent`` has ``original``."""
        setattr(parent, name, other)
        self.done.append((parent, name, original))

    def undo(self) -> None:
        """Put all originals back."""
        while self.done:
            parent, name, original = self.done.pop()
            setattr(parent, name, original)


def children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Every (parent, name, child) of a model; a list, so that children may be replaced meanwhile."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
