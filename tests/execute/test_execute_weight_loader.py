"""Reading the weights of images in a thread, and what can go wrong."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from weight_builders import next_arrival, tensor_image

from shoal.execute.weights import image as images
from shoal.execute.weights.image import CHUNK_BYTES, Place, WeightImage
from shoal.execute.weights.loader import WeightLoader

pytestmark = pytest.mark.without_native

CHUNKS = 3
SIZE = CHUNKS * CHUNK_BYTES - 1000


@pytest.fixture
def loader() -> Iterator[WeightLoader]:
    loader = WeightLoader()
    yield loader
    loader.close()


@pytest.fixture
def stored(tmp_path: Path) -> tuple[torch.Tensor, WeightImage, torch.Tensor]:
    """A tensor of three chunks in an image, the image, and the tensor that was stored."""
    tensor = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
    return *tensor_image(tmp_path / "image", tensor), tensor


def resident_bytes() -> int:
    """Memory of this process that the system holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_weights_come_leave_and_come_again_at_the_same_address(
    loader: WeightLoader, stored: tuple[torch.Tensor, WeightImage, torch.Tensor]
) -> None:
    tensor, image, expected = stored
    address = tensor.data_ptr()
    for _ in range(3):
        assert not tensor.any()
        loader.fetch("a", image)
        arrival = next_arrival(loader)
        assert (arrival.weights, arrival.error, image.place) == ("a", None, Place.RESIDENT)
        assert torch.equal(tensor, expected)
        image.memory.release()
    assert (tensor.data_ptr(), loader.arrived) == (address, False)


def test_memory_is_held_only_while_the_weights_are_there(tmp_path: Path, loader: WeightLoader) -> None:
    size = 64 << 20
    _tensor, image = tensor_image(tmp_path / "image", torch.ones(size, dtype=torch.uint8))
    absent = resident_bytes()
    for _ in range(5):
        loader.fetch("a", image)
        assert next_arrival(loader).error is None
        assert size * 0.9 < resident_bytes() - absent < size * 1.2
        image.memory.release()
        assert resident_bytes() - absent < size * 0.1


def test_several_fetches_come_one_after_the_other(tmp_path: Path, loader: WeightLoader) -> None:
    names = [str(number) for number in range(5)]
    for name in names:
        loader.fetch(name, tensor_image(tmp_path / name, torch.ones(10))[1])
    assert [arrival.weights for arrival in _all_arrivals(loader, 5)] == names


def _all_arrivals(loader: WeightLoader, count: int) -> list:
    found = []
    while len(found) < count:
        found += loader.arrivals()
    return found


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "has another checksum than when it was written; remove the folder"),
        (lambda path: os.truncate(path, SIZE // 2), f"has {SIZE // 2} bytes instead of {SIZE}"),
        (lambda path: path.write_bytes(path.read_bytes() + b"0"), f"has {SIZE + 1} bytes instead of {SIZE}"),
    ],
)
def test_a_damaged_file_is_an_error_until_it_is_repaired(
    loader: WeightLoader, stored: tuple[torch.Tensor, WeightImage, torch.Tensor], damage, message: str
) -> None:
    tensor, image, expected = stored
    content = image.weights_file.read_bytes()
    for times in range(2):
        if times:  # its checksums were right before
            os.utime(image.weights_file, (1, 1))
        damage(image.weights_file)
        loader.fetch("a", image)
        arrival = next_arrival(loader)
        assert message in (arrival.error or "")
        assert (image.place, tensor.any()) == (Place.ABSENT, False)
        image.weights_file.write_bytes(content)
        loader.fetch("a", image)
        assert next_arrival(loader).error is None
        assert torch.equal(tensor, expected)
        image.memory.release()


def test_a_file_that_ends_while_it_is_read_is_an_error(
    loader: WeightLoader,
    stored: tuple[torch.Tensor, WeightImage, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, image, _ = stored
    read = os.preadv
    monkeypatch.setattr(
        images.os, "preadv", lambda f, parts, at: read(f, parts, at) if at < CHUNK_BYTES else 0
    )
    loader.fetch("a", image)
    assert f"ends at {CHUNK_BYTES} bytes" in (next_arrival(loader).error or "")


def test_short_reads_are_continued(
    loader: WeightLoader,
    stored: tuple[torch.Tensor, WeightImage, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor, image, expected = stored
    read = os.preadv
    monkeypatch.setattr(images.os, "preadv", lambda f, parts, at: read(f, [parts[0][:1_000_000]], at))
    loader.fetch("a", image)
    assert next_arrival(loader).error is None
    assert torch.equal(tensor, expected)


def test_checksums_are_compared_once_for_each_state_of_the_file(
    loader: WeightLoader,
    stored: tuple[torch.Tensor, WeightImage, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, image, _ = stored
    checked: list[int] = []
    crc32 = images.zlib.crc32
    monkeypatch.setattr(images.zlib, "crc32", lambda chunk: checked.append(len(chunk)) or crc32(chunk))
    for touched in (False, False, True, False):
        if touched:
            os.utime(image.weights_file, (7, 7))
        loader.fetch("a", image)
        assert next_arrival(loader).error is None
        image.memory.release()
    assert len(checked) == 2 * CHUNKS
    assert sum(checked) == 2 * SIZE


class Clock:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def read(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self.now += seconds
        return False


def test_a_bandwidth_holds_for_the_whole_fetch(
    stored: tuple[torch.Tensor, WeightImage, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    read = os.preadv

    def slow(file: int, parts: list[memoryview], at: int) -> int:
        clock.now += 0.25 if at else 1.5
        return read(file, parts, at)

    monkeypatch.setattr(images.os, "preadv", slow)
    loader = WeightLoader(bandwidth=CHUNK_BYTES, clock=clock.read, wait=clock.wait)
    for _ in range(2):
        clock.pauses.clear()
        loader.fetch("a", stored[1])
        assert next_arrival(loader).seconds == pytest.approx(SIZE / CHUNK_BYTES)
        # The first chunk takes longer than the limit demands, and the second makes up for that.
        assert clock.pauses == pytest.approx([0.25, SIZE / CHUNK_BYTES - 2.25])
        stored[1].memory.release()
    loader.close()


class Gate:
    """Stops a loader after each chunk, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.chunks = 0
        self.loader = WeightLoader(bandwidth=1.0, wait=self.wait)

    def wait(self, seconds: float) -> bool:
        self.chunks += 1
        self.reached.set()
        assert self.open.wait(60)
        return False


def test_weights_that_are_forgotten_do_not_arrive(
    stored: tuple[torch.Tensor, WeightImage, torch.Tensor], tmp_path: Path
) -> None:
    tensor, image, _ = stored
    gate = Gate()
    gate.loader.fetch("a", image)
    assert gate.reached.wait(60)
    assert image.place is Place.COMING
    gate.loader.fetch("b", tensor_image(tmp_path / "b", torch.ones(4))[1])
    gate.loader.forget("a")
    assert image.place is Place.ABSENT
    gate.open.set()
    assert next_arrival(gate.loader).weights == "b"
    assert not tensor.any()
    assert gate.chunks == 2  # the rest of what was forgotten is not read
    gate.loader.close()


def test_weights_may_be_fetched_again_while_the_fetch_that_was_forgotten_ends(
    stored: tuple[torch.Tensor, WeightImage, torch.Tensor],
) -> None:
    tensor, image, expected = stored
    gate = Gate()
    gate.loader.fetch("a", image)
    assert gate.reached.wait(60)
    gate.loader.forget("a")
    gate.loader.fetch("a", image)
    gate.open.set()
    assert next_arrival(gate.loader).error is None
    assert torch.equal(tensor, expected)
    gate.loader.close()


def test_an_arrival_that_nobody_took_is_forgotten(
    loader: WeightLoader, stored: tuple[torch.Tensor, WeightImage, torch.Tensor]
) -> None:
    loader.fetch("a", stored[1])
    while not loader.arrived:
        pass
    loader.forget("a")
    assert loader.arrivals() == []


def test_closing_ends_the_pause_of_a_fetch(stored: tuple[torch.Tensor, WeightImage, torch.Tensor]) -> None:
    tensor, image, _ = stored
    loader = WeightLoader(bandwidth=1.0)  # it would take months
    loader.fetch("a", image)
    while not tensor[1]:
        pass
    loader.close()
    assert image.place is Place.ABSENT
    assert not tensor.any()


def test_closing_ends_a_fetch_after_the_present_chunk(
    loader: WeightLoader,
    stored: tuple[torch.Tensor, WeightImage, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[int] = []
    read, reached = os.preadv, threading.Event()

    def read_until_closed(file: int, parts: list[memoryview], at: int) -> int:
        starts.append(at)
        reached.set()
        assert loader._closed.wait(60)
        return read(file, parts, at)

    monkeypatch.setattr(images.os, "preadv", read_until_closed)
    loader.fetch("a", stored[1])
    assert reached.wait(60)
    loader.close()
    assert (starts, stored[1].place) == ([0], Place.ABSENT)
