"""The heap setting takes effect where the C library has it."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from shoal.execute.heap import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
x = torch.randn(2048, 576)
def step():
    y = x.pow(2) + x
    z = (y * 2).bfloat16()
    return (z * 3).float().mean()
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    faults = {
        how: int(subprocess.check_output([sys.executable, "-c", PROGRAM, how])) for how in ("keep", "default")
    }
    assert faults["keep"] * 5 < faults["default"], faults
