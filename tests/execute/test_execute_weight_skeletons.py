"""Models without the bytes of their tensors, and with them in other memory."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.execute.weights.skeleton import ALIGNMENT, Skeleton, put_together, take_apart

pytestmark = pytest.mark.without_native

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64)


def content_of(skeleton: Skeleton) -> torch.Tensor:
    """The bytes of an image."""
    content = bytearray(skeleton.num_bytes)
    for extent in skeleton.extents:
        content[extent.offset : extent.offset + extent.num_bytes] = extent.content
    return torch.tensor(list(content), dtype=torch.uint8)


def moved(model: Any) -> tuple[Any, torch.Tensor]:
    """The model in other memory, and that memory."""
    skeleton = take_apart(model)
    memory = content_of(skeleton)
    return put_together(skeleton.pickled, memoryview(memory.numpy())), memory


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of a few storages, which may overlap, have gaps or be empty."""
    storages = [torch.arange(2048, dtype=torch.int32) + 5000 * n for n in range(draw(st.integers(1, 3)))]
    found = []
    for _ in range(draw(st.integers(1, 8))):
        flat = draw(st.sampled_from(storages)).view(torch.int8).view(draw(st.sampled_from(DTYPES)))
        start = draw(st.integers(0, 300))
        rows, columns, gap = draw(st.integers(0, 5)), draw(st.integers(1, 5)), draw(st.integers(0, 3))
        view = flat.as_strided((rows, columns), (columns + gap, 1), start)
        found.append(view.t() if draw(st.booleans()) else view)
    return found


def addresses(tensor: torch.Tensor) -> Iterator[int]:
    """Of every byte of every element."""
    for index in range(tensor.shape[0]):
        for other in range(tensor.shape[1]):
            first = tensor[index, other].data_ptr()
            yield from range(first, first + tensor.element_size())


@given(views())
@settings(max_examples=examples(60))
def test_tensors_keep_their_bytes_their_layout_and_what_they_share(tensors: list[torch.Tensor]) -> None:
    copies, memory = moved(tensors)
    places: dict[int, int] = {}
    for tensor, copy in zip(tensors, copies, strict=True):
        assert (copy.dtype, copy.shape, copy.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(copy, tensor)
        for old, new in zip(addresses(tensor), addresses(copy), strict=True):
            assert places.setdefault(old, new) == new
            assert (new - memory.data_ptr() - old) % ALIGNMENT == 0
    assert len(set(places.values())) == len(places)


def test_memory_that_no_tensor_reads_is_left_out() -> None:
    large = torch.zeros(1 << 20)
    assert take_apart([large[1000:1010], large[5000:5010]]).num_bytes < 400


def test_tied_parameters_stay_one_object() -> None:
    module = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(5, 8), "head": torch.nn.Linear(8, 5, bias=False)}
    )
    module["head"].weight = module["embed"].weight
    module.requires_grad_(False)
    skeleton = take_apart(module)
    copy = put_together(skeleton.pickled, memoryview(content_of(skeleton).numpy()))
    assert copy["head"].weight is copy["embed"].weight
    assert isinstance(copy["head"].weight, torch.nn.Parameter)
    assert not copy["head"].weight.requires_grad
    assert skeleton.num_bytes == 5 * 8 * 4


def test_a_model_without_tensors_has_an_empty_image() -> None:
    skeleton = take_apart({"a": 1})
    assert (skeleton.num_bytes, put_together(skeleton.pickled, memoryview(bytearray()))) == (0, {"a": 1})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.ones(2, 2, dtype=torch.bfloat16).to_mkldnn() if torch.backends.mkldnn.is_available() else None,
        torch.nn.Buffer(torch.ones(2)).as_subclass(type("Other", (torch.Tensor,), {})),
    ],
)
def test_tensors_without_an_address_are_refused(tensor: torch.Tensor | None) -> None:
    if tensor is not None:
        with pytest.raises(pickle.PicklingError, match="a tensor is"):
            take_apart({"weight": tensor})
