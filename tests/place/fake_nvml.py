"""A module that answers as ``pynvml`` does, for machines that tests make up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace


@dataclass
class FakeGpu:
    """One GPU."""

    name: str
    memory_bytes: int
    bus_id: str
    nvlinks: Sequence[tuple[int, int, str]] = ()
    """(generation, kind of the other end, its bus) of each active link."""
    pcie: tuple[int, int] = (4, 16)
    bus_bits: int | None = None
    memory_megahertz: int = 0


@dataclass
class FakeNvml:
    """NVML over these GPUs; questions that it has no answer to are errors, as of the real one."""

    gpus: Sequence[FakeGpu]
    ancestors: Mapping[tuple[int, int], int] = field(default_factory=dict)
    driver: bool = True
    bytes_as_text: bool = False
    opened: int = 0

    NVML_NVLINK_MAX_LINKS = 18
    NVML_CLOCK_MEM = 2

    class NVMLError(Exception):
        """As the module's."""

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self._text(self.gpus[handle].name)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=self.gpus[handle].memory_bytes)

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self._text(self.gpus[handle].bus_id.upper()))

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if not self.gpus[handle].nvlinks:
            raise self.NVMLError("Not Supported")
        return int(link < len(self.gpus[handle].nvlinks))

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return self.gpus[handle].nvlinks[link][0]

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return self.gpus[handle].nvlinks[link][1]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self._text(self.gpus[handle].nvlinks[link][2]))

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:
        if (first, second) not in self.ancestors:
            raise self.NVMLError("Not Supported")
        return self.ancestors[first, second]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self.gpus[handle].pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self.gpus[handle].pcie[1]

    def nvmlDeviceGetMemoryBusWidth(self, handle: int) -> int:
        bits = self.gpus[handle].bus_bits
        if bits is None:
            raise self.NVMLError("Not Supported")
        return bits

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        assert clock == self.NVML_CLOCK_MEM
        return self.gpus[handle].memory_megahertz

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.bytes_as_text else text
