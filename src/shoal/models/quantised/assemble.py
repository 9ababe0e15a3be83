"""Finding the tensors that stand for quantised matrices, by their names, and checking their shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shoal.core import ModelUnsupported
from shoal.models.folder.weights import DENSE, StoredTensor
from shoal.models.quantised.config import POSSIBLE
from shoal.models.quantised.scheme import WHOLE, Quantisation, Scheme, Storage

_WORD_BITS = 32
_ELEMENTS = {False: "I8", True: "F8_E4M3"}
"""Types of numbers in Storage.PLAIN, for integers and floats."""
_NUMBERS = ("I8", "U8", "I32", "F8_E4M3", "F8_E5M2")
"""Types of which quantised weights are."""
_WEIGHTS = (".weight", ".qweight", ".weight_packed")
"""Ends of names of weights."""


class _Names(NamedTuple):
    """Ends of the names of a matrix's tensors, after the name of its module."""

    numbers: str
    scales: tuple[str, ...]
    """One of these."""
    zeros: str
    groups: str
    shape: str = ".weight_shape"

    @property
    def others(self) -> tuple[str, ...]:
        """All but those of the numbers."""
        return tuple(filter(None, (*self.scales, self.zeros, self.groups, self.shape)))


_GPTQ_NAMES = _Names(".qweight", (".scales",), ".qzeros", ".g_idx")
_NAMES = {
    Storage.AWQ: _GPTQ_NAMES,
    Storage.GPTQ: _GPTQ_NAMES,
    Storage.PACKED: _Names(".weight_packed", (".weight_scale",), ".weight_zero_point", ".weight_g_idx"),
    Storage.PLAIN: _Names(".weight", (".weight_scale", ".weight_scale_inv"), ".weight_zero_point", ""),
}


_OTHERS = (".bias", ".masked_bias", *(end for names in _NAMES.values() for end in names.others))
"""Ends of names of masks, and of what belongs to weights."""


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A matrix that is stored in several tensors, whose types and shapes have been checked."""

    shape: tuple[int, int]
    """Outputs and inputs."""
    scheme: Scheme
    parts: Mapping[str, str]
    """Names of the stored tensors: ``numbers``, ``scales``, and where they exist ``zeros`` (always those of a
    scheme that is not symmetric), ``groups`` (of each input) and ``shape``."""

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of blocks with a scale."""
        sides = zip(self.shape, self.scheme.block, strict=True)
        rows, columns = (1 if block == WHOLE else -(-side // block) for side, block in sides)
        return rows, columns

    @property
    def by_inputs(self) -> bool:
        """Whether scales and zeros are stored as [inputs, outputs] of blocks, not as [outputs, inputs]."""
        return self.scheme.storage in (Storage.AWQ, Storage.GPTQ)

    @property
    def as_stored(self) -> StoredTensor:
        """The matrix as one tensor."""
        return StoredTensor(self.shape, f"{'F' if self.scheme.is_float else 'I'}{self.scheme.bits}")


def assemble(
    folder: Path, stored: Mapping[str, StoredTensor], quantisation: Quantisation | None
) -> dict[str, QuantisedTensor]:
    """The quantised matrices among the tensors of ``folder``, by the name of the dense weight.

    Raises ModelUnsupported if ``quantisation`` does not say how to read a weight that is not dense, or says
    something else than its tensors.
    """
    found = {}
    for name, tensor in stored.items():
        if tensor.dtype in DENSE or not _is_weight(name, tensor):
            continue
        module, end = name.rpartition(".")[0], f".{name.rpartition('.')[2]}"
        scheme = None if quantisation is None else quantisation.scheme_of(module)
        if scheme is None or _NAMES[scheme.storage].numbers != end:
            says = "has no quantization_config" if quantisation is None else "says nothing of that"
            raise ModelUnsupported(
                f"{folder} stores {name} as {tensor.dtype}, so it is quantised, and config.json {says};"
                f" possible are {POSSIBLE}"
            )
        if end != ".weight" and f"{module}.weight" in stored:
            raise ModelUnsupported(f"{folder} stores {module} twice: as {name} and as {module}.weight")
        found[f"{module}.weight"] = _assembled(folder, stored, module, scheme)
    return found


def _is_weight(name: str, tensor: StoredTensor) -> bool:
    """Whether a tensor that is not dense is a weight, and not a mask or a part of another."""
    if name.endswith(_WEIGHTS):
        return True
    # Experts in one tensor, for example, have names of their own.
    return tensor.dtype in _NUMBERS and len(tensor.shape) > 1 and not name.endswith(_OTHERS)


def _assembled(
    folder: Path, stored: Mapping[str, StoredTensor], module: str, scheme: Scheme
) -> QuantisedTensor:
    names = _NAMES[scheme.storage]
    parts = {"numbers": module + names.numbers}
    parts["scales"] = module + next((end for end in names.scales if module + end in stored), names.scales[0])
    if scheme.storage in (Storage.AWQ, Storage.GPTQ) or not scheme.symmetric:
        parts["zeros"] = module + names.zeros
    if names.groups and (scheme.scattered or module + names.groups in stored):
        parts["groups"] = module + names.groups
    if module + names.shape in stored:
        parts["shape"] = module + names.shape
    for part in parts.values():
        if part not in stored:
            raise ModelUnsupported(f"{folder} has no tensor {part}, which its quantization_config requires")
    numbers = stored[parts["numbers"]]
    if len(numbers.shape) != 2:
        raise ModelUnsupported(
            f"{folder} stores {parts['numbers']} with {len(numbers.shape)} dimensions; possible are matrices"
        )
    tensor = QuantisedTensor(_shape(numbers.shape, scheme), scheme, parts)
    _check(folder, tensor, stored)
    return tensor


def _shape(numbers: tuple[int, ...], scheme: Scheme) -> tuple[int, int]:
    """Outputs and inputs of a matrix whose numbers are stored in a tensor of this shape."""
    rows, columns = numbers
    in_word = _WORD_BITS // scheme.bits
    return {
        Storage.AWQ: (columns * in_word, rows),
        Storage.GPTQ: (columns, rows * in_word),
        Storage.PACKED: (rows, columns * in_word),
        Storage.PLAIN: (rows, columns),
    }[scheme.storage]


class _Expected(NamedTuple):
    """What a stored tensor may be."""

    types: tuple[str, ...]
    shapes: Sequence[tuple[int, ...]]
    """Empty: any."""


def _expected(tensor: QuantisedTensor) -> dict[str, _Expected]:
    """By part."""
    (outputs, inputs), (rows, columns), scheme = tensor.shape, tensor.blocks, tensor.scheme
    words = -(-outputs * scheme.bits // _WORD_BITS)
    by_block: list[tuple[int, ...]] = [(rows, columns)]
    if columns == 1:
        by_block.append((rows,))
    if rows == columns == 1:
        by_block.append(())
    if tensor.by_inputs:
        by_block, zeros = [(columns, outputs)], _Expected(("I32",), [(columns, words)])
    elif scheme.storage is Storage.PACKED and scheme.block[0] != WHOLE:
        zeros = _Expected(("I32",), [(words, columns)])
    else:
        zeros = _Expected(("I8",), by_block)
    plain = scheme.storage is Storage.PLAIN
    return {
        "numbers": _Expected((_ELEMENTS[scheme.is_float] if plain else "I32",), ()),
        "scales": _Expected((*DENSE, "F8_E8M0"), by_block),
        "zeros": zeros,
        "groups": _Expected(("I32", "I64"), [(inputs,)]),
    }


def _check(folder: Path, tensor: QuantisedTensor, stored: Mapping[str, StoredTensor]) -> None:
    """Raise ModelUnsupported if a stored tensor is not what the scheme says."""
    for part, expected in _expected(tensor).items():
        name = tensor.parts.get(part)
        if name is None:
            continue
        found = stored[name]
        if found.dtype not in expected.types or (expected.shapes and found.shape not in expected.shapes):
            shape = f" {list(expected.shapes[0])}" if expected.shapes else ""
            raise ModelUnsupported(
                f"{folder} stores {name} as {found.dtype} {list(found.shape)}, but by its quantization_config"
                f" that is {' or '.join(expected.types)}{shape}"
            )
