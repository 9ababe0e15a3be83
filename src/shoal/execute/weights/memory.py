"""WeightMemory: addresses for a model's weights, with memory behind them only while the weights are there."""

import ctypes
import mmap

from shoal.core import ConfigError
from shoal.execute.huge_pages import MADV_HUGEPAGE, PAGE, advise

_MAP_NORESERVE = 0x4000
_MADV_DONTNEED = 4


class WeightMemory:
    """Memory of ``num_bytes`` bytes at an address that never changes, in huge pages if the system has them.

    Tensors in it, and pointers to them, stay valid while the weights are away. The addresses are given back
    with the last view of them. Linux only.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises ConfigError if the process cannot have so many addresses."""
        # Whole pages, since a huge page is given back only as a whole.
        self._mapped_bytes = -(-num_bytes // PAGE) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, self._mapped_bytes + PAGE, flags=flags)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"no addresses are left for {num_bytes / 2**30:.2f} GiB of weights ({error}): the limit on"
                " virtual memory (ulimit -v, or vm.overcommit_memory) is too low"
            ) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = -address % PAGE
        self._address = address + start
        self.view = memoryview(memory)[start : start + num_bytes]
        """The bytes; zeros where nothing was written since the last ``release``."""
        advise(self._address, self._mapped_bytes, MADV_HUGEPAGE)

    def release(self) -> None:
        """Give the memory back to the system, with its content."""
        if not advise(self._address, self._mapped_bytes, _MADV_DONTNEED):
            raise RuntimeError("the system does not take back the memory of weights")
