"""The weights of a folder as transformers reads them, with quantised matrices dequantised one by one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shoal.execute.quantised.matrix import QuantisedMatrix
from shoal.models import open_weights, read_quantised, weight_files


@contextmanager
def open_slices(folder: Path) -> Iterator[dict[str, Any]]:
    """Slices of all dense tensors of ``folder``, and a QuantisedMatrix for each quantised one, by name.

    They are read by ``slices[name][...]``, while the context is open. Raises as ``read_weight_headers`` does.
    """
    quantised = read_quantised(folder)
    with ExitStack() as files:
        opened = [files.enter_context(open_weights(file, "pt")) for file in weight_files(folder)]
        stored = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
        parts = {part for tensor in quantised.values() for part in tensor.parts.values()}
        slices: dict[str, Any] = {name: part for name, part in stored.items() if name not in parts}
        for name, tensor in quantised.items():
            own = {role: stored[part] for role, part in tensor.parts.items()}
            slices[name] = QuantisedMatrix(tensor, own)
        yield slices
