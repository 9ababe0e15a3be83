"""GPU check, part `device`: the card's properties, speed of copies, speed and error of matrix products."""

from functools import partial

import torch

from benchmarks.gpu_check.cases import Cases, Figures, SkipCase
from benchmarks.gpu_check.timing import copy_gb_per_s, free_bytes, median_ms

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest error of a product, relative to its largest element."""


def run(cases: Cases) -> None:
    device, tiny = cases.device, cases.tiny
    cases.run("card", partial(card, device), line="{card}, {multiprocessors} SMs, {memory, GiB:.0f} GiB")
    cases.run(
        "copy, bytes read and written",
        lambda: {"GB/s": copy_gb_per_s(device, tiny=tiny)},
        line="copies {GB/s:,.0f} GB/s",
    )
    for dtype in TOLERANCE:
        cases.run(f"product in {dtype} beside one in float64", partial(check_product, device, dtype))
    size = 128 if tiny else 8192
    for dtype in ("bfloat16", "float32"):
        cases.run(
            f"product in {dtype}, {size} x {size} x {size}",
            partial(time_product, device, dtype, size),
            line="{TFLOP/s:.0f} TFLOP/s in bfloat16" if dtype == "bfloat16" else None,
        )
    for pinned in (True, False):
        for to_device in (True, False):
            memory, direction = (
                "pinned" if pinned else "pageable",
                "to device" if to_device else "from device",
            )
            cases.run(
                f"copy {direction}, {memory} host memory",
                partial(time_transfer, device, 1 << 20 if tiny else 1 << 29, pinned, to_device),
                line="host " + ("pinned" if pinned else "pageable") + " {GB/s:.1f} GB/s"
                if to_device
                else None,
            )


def card(device: str) -> Figures:
    if device == "cpu":
        return {"card": "cpu", "multiprocessors": 0, "memory, GiB": 0.0}
    facts = torch.cuda.get_device_properties(device)
    return {
        "card": facts.name,
        "multiprocessors": facts.multi_processor_count,
        "memory, GiB": facts.total_memory / 2**30,
        "free, GiB": free_bytes(device) / 2**30,
        "capability": f"{facts.major}.{facts.minor}",
        "L2, MiB": facts.L2_cache_size / 2**20,
        "CUDA of torch": str(torch.version.cuda),
    }


def check_product(device: str, dtype: str) -> Figures:
    """Compare a product of odd sizes with float64."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for shape in ((257, 515), (515, 129)))
    left, right = (each.to(getattr(torch, dtype)) for each in (left, right))
    expected = left.double() @ right.double()
    product = (left.to(device) @ right.to(device)).double().cpu()
    error = float((product - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE[dtype]:
        raise AssertionError(f"relative error {error:.2g}, more than {TOLERANCE[dtype]:.0e}")
    return {"largest relative error": error}


def time_product(device: str, dtype: str, size: int) -> Figures:
    left, right = (torch.randn((size, size), device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(left)
    took_ms = median_ms(lambda: torch.mm(left, right, out=out), device, 9)
    return {"TFLOP/s": 2 * size**3 / took_ms / 1e9}


def time_transfer(device: str, size: int, pinned: bool, to_device: bool) -> Figures:
    if device == "cpu" and pinned:
        raise SkipCase("a CPU's memory is the host's")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1)
    on_device = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    source, target = (host, on_device) if to_device else (on_device, host)
    took_ms = median_ms(lambda: target.copy_(source, non_blocking=pinned), device, 5)
    return {"GB/s": size / took_ms / 1e6}
