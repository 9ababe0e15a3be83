"""Triton's interpreter, made to fail where a GPU computes something else, or not the same every time.

By itself it is kinder than a GPU: what a mask leaves out is 0, programs run one after the other, and memory
outside of tensors is read as if it were theirs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def strict_interpreter() -> Iterator[None]:
    """Inside, kernels fail if they use memory outside of their tensors, or write one place twice.

    What a load masks, and gives no other value, is NaN or -1.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, _get_np_dtype

    launch = _Launch()
    run, load = GridExecutor.__call__, InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def strict_run(self: Any, *arguments: Any, **keywords: Any) -> None:
        launch.begin([*arguments, *keywords.values()])
        run(self, *arguments, **keywords)
        launch.end()

    def strict_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        kind = pointers.get_element_ty()
        dtype = np.dtype(_get_np_dtype(kind))
        launch.check(pointers.data[mask.data.astype(bool)], dtype.itemsize)
        if other is None:
            poison = np.full((*pointers.data.shape, dtype.itemsize), 0xFF, dtype=np.uint8)
            other = TensorHandle(poison.view(dtype)[..., 0], kind)
        return load(self, pointers, mask, other, *rest)

    def strict_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        places = pointers.data[mask.data.astype(bool)]
        launch.check(places, value.data.itemsize)
        launch.written.append(places)
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", strict_run)
        patch.setattr(InterpreterBuilder, "create_masked_load", strict_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", strict_store)
        yield


class _Launch:
    """The memory that a kernel was given, and what its programs have written so far."""

    def __init__(self) -> None:
        self.written: list[np.ndarray] = []
        self._begins = self._ends = np.empty(0, dtype=np.uint64)

    def begin(self, arguments: list[Any]) -> None:
        self.written = []
        storages = [each.untyped_storage() for each in arguments if isinstance(each, torch.Tensor)]
        self._begins = np.array([each.data_ptr() for each in storages], dtype=np.uint64)
        self._ends = np.array([each.data_ptr() + each.nbytes() for each in storages], dtype=np.uint64)

    def check(self, places: np.ndarray, itemsize: int) -> None:
        """Raise IndexError if something of that size at one of these addresses is in no tensor."""
        inside = (places[:, None] >= self._begins) & (places[:, None] + np.uint64(itemsize) <= self._ends)
        if not inside.any(1).all():
            raise IndexError("a kernel uses memory outside of its tensors")

    def end(self) -> None:
        written = np.concatenate(self.written or [np.empty(0)])
        if len(np.unique(written)) < len(written):
            raise AssertionError("a kernel writes the same address twice, in an undefined order")
