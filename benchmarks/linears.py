"""Times of all linear layers of a step, in float32, bfloat16, int8 and four bits.

    python -m benchmarks.linears                               # smollm2 at 1, 16, 64 and 2,048 rows
    python -m benchmarks.linears --model gemma3-270m --rows 1 64
    python -m benchmarks.linears --threads 1                   # by CPU time, on a busy machine

Layers have the model's shapes and random weights, and are called one after another. The output head is among
them; for more than 256 rows (a prompt's chunk) it computes one row. Formats take turns in each round; prints
medians in milliseconds, and the fastest in brackets. int8 includes the quantisation of inputs, oneDNN's int8
does not; weights have a scale for each output or, as in GGUF files, for every 32 inputs of an output. With
one thread, CPU time is measured, which other processes affect less; with more, elapsed time.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.interrupts import print_at_end
from shoal.execute.huge_pages import HugePages
from shoal.execute.linear.packed_linear import OnednnLinear, PackedLinear, bf16_library, onednn_packs_bf16
from shoal.execute.linear.packed_weights import GROUP, pack_bf16, pack_int8, pack_integers, quantise_channels
from shoal.execute.model.checkpoint import read_model_config
from shoal.models import resolve_model
from shoal.native import load_native

LARGEST_BATCH = 256

Product = Callable[[torch.Tensor], object]


def shapes_of(model: str) -> list[tuple[int, int]]:
    """(outputs, inputs) of each layer; the head is last."""
    config = read_model_config(model, resolve_model(model))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config.get_text_config())
    layers = [each for each in module.modules() if type(each) is nn.Linear]
    return [(each.out_features, each.in_features) for each in layers]


def onednn_int8(values: torch.Tensor, scales: torch.Tensor) -> Product:
    packed, zeros = (
        torch.ops.onednn.qlinear_prepack(values, None),
        torch.zeros(len(values), dtype=torch.int32),
    )

    def multiply(x: torch.Tensor) -> object:
        return torch.ops.onednn.qlinear_pointwise(
            x, 0.02, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return multiply


def formats_of(shapes: list[tuple[int, int]]) -> dict[str, tuple[torch.dtype, list[Product]]]:
    """Dtype of inputs and a product for each layer, by format."""
    formats: dict[str, tuple[torch.dtype, list[Product]]] = {
        "float32": (torch.float32, []),
        "oneDNN bfloat16": (torch.bfloat16, []),
        "bfloat16": (torch.bfloat16, []),
        "int8": (torch.bfloat16, []),
        "int8 in groups": (torch.bfloat16, []),
        "four bits in groups": (torch.bfloat16, []),
        "oneDNN int8, quantised before": (torch.uint8, []),
    }
    products = [products for _, products in formats.values()]
    pages, native, bf16 = HugePages(), load_native(), bf16_library()
    onednn = onednn_packs_bf16()
    for outputs, inputs in shapes:
        weight = torch.randn(outputs, inputs) * inputs**-0.5
        dense = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        values, scales = quantise_channels(weight)
        products[0].append(partial(F.linear, weight=weight))
        products[1].append(OnednnLinear(dense.weight, None) if onednn else dense)
        products[2].append(
            dense if bf16 is None else PackedLinear(pack_bf16(dense.weight, None, pages), bf16)
        )
        products[3].append(PackedLinear(pack_int8(values, scales).copied(pages.put), native))
        grouped = scales[:, None].expand(-1, -(-inputs // GROUP))
        products[4].append(PackedLinear(pack_int8(values, grouped).copied(pages.put), native))
        narrow = pack_integers((values // 16).to(torch.int8), grouped)
        products[5].append(PackedLinear(narrow.copied(pages.put), native))
        products[6].append(onednn_int8(values, scales))
    return formats


@torch.inference_mode()
def seconds(products: list[Product], inputs: dict[int, torch.Tensor], widths: list[int]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for number, (product, width) in enumerate(zip(products, widths, strict=True)):
        x = inputs[width]
        last = number == len(products) - 1 and len(x) > LARGEST_BATCH
        product(x[:1] if last else x)
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 2048])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=20, help="for each number of rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native = load_native()
    shapes = shapes_of(args.model)
    widths = [inputs for _, inputs in shapes]
    formats = formats_of(shapes)
    kernel = "torch (the native library is not built)" if native is None else native.variant
    Console().print(
        f"{args.model}, {len(shapes)} layers, {args.threads} threads, int8 by {kernel}; milliseconds"
    )
    table = Table("rows", *formats)
    with print_at_end(table):
        for rows in args.rows:
            inputs = {
                dtype: {width: torch.rand(rows, width).mul(100).to(dtype) for width in set(widths)}
                for dtype, _ in formats.values()
            }
            taken: dict[str, list[float]] = {name: [] for name in formats}
            end = time.perf_counter() + args.seconds
            while time.perf_counter() < end or len(taken["int8"]) < 4:
                for name, (dtype, products) in formats.items():
                    taken[name].append(seconds(products, inputs[dtype], widths))
            shown = (
                f"{median(times[1:]) * 1e3:.1f} ({min(times[1:]) * 1e3:.1f})" for times in taken.values()
            )
            table.add_row(f"{rows:,}", *shown)


if __name__ == "__main__":
    main()
