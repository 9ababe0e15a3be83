"""Replacing modules of a model, with undo."""

from dataclasses import dataclass, field

from torch import nn


@dataclass(slots=True)
class Replacements:
    """Modules that were replaced."""

    done: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    """(parent, name, original) of each replacement."""

    def put(self, parent: nn.Module, name: str, original: nn.Module, replacement: nn.Module) -> None:
        """Put ``replacement`` where ``parent`` has ``original``."""
        setattr(parent, name, replacement)
        self.done.append((parent, name, original))

    def undo(self) -> None:
        while self.done:
            parent, name, original = self.done.pop()
            setattr(parent, name, original)


def children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Every (parent, name, child) of a model, as a list, so that children can be replaced while iterating."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
