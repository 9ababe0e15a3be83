"""``shoal topology``: devices and links of this machine, and maps of a model's layers onto them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.output import STANDARD_OUTPUT, check_outputs, output_file
from shoal.config import parse_size
from shoal.core import ConfigError

if TYPE_CHECKING:
    from shoal.forecast import ModelSpec
    from shoal.place.topology import Topology

DEFAULT_RESERVE = "1GiB"


def topology(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Read a topology from this file, not from this machine.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Write YAML to edit; - is standard output."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="MODEL",
            help="Divide a model by layers over the devices: a known name, or a folder with config.json.",
        ),
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=f"Memory that --map leaves on each device for KV and activations; else {DEFAULT_RESERVE}.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of this machine; else its host name.")
    ] = None,
) -> None:
    """Show devices, memory and links, write them as YAML to edit, or map a model's layers onto them.

    GPUs are found with NVIDIA's driver (needs `pip install nvidia-ml-py`); a machine without GPUs shows its
    CPUs by NUMA node. Rates and latencies are from data sheets, not measured. For several machines, run it
    on each and join the lists of devices.

    **Example:** `shoal topology -o cluster.yaml`, and then `shoal topology cluster.yaml --map qwen2.5-14b`
    """
    from rich.console import Console

    from shoal.cli.topology_report import device_table, link_table, map_table
    from shoal.config.topology import format_topology, read_topology
    from shoal.place.device_maps import problem_of

    if file is not None and host is not None:
        raise ConfigError("--host names this machine; leave it out where a file is read")
    if model is None and reserve is not None:
        raise ConfigError("--reserve is for --map MODEL")
    check_outputs(output)
    found = _detected(host) if file is None else read_topology(file)
    console = Console(stderr=output == STANDARD_OUTPUT)
    if output is not None:
        with output_file(output) as path:
            path.write_text(format_topology(found), encoding="utf-8")
    if model is not None:
        reserved = _size(reserve or DEFAULT_RESERVE)
        console.print(map_table(problem_of(_shape(model), found.cluster, found.speeds(), reserved)))
        return
    console.print(device_table(found), link_table(found), sep="\n")
    if output is None and file is None:
        console.print("Write it to a file, to edit it:  shoal topology -o cluster.yaml", highlight=False)


def _detected(host: str | None) -> "Topology":
    from shoal.place.topology import detect, has_nvidia_driver, load_nvml

    nvml = load_nvml()
    if nvml is None and has_nvidia_driver():
        typer.echo("This machine has NVIDIA GPUs: `pip install nvidia-ml-py` to see them.", err=True)
    return detect(nvml, host or "")


def _shape(model: str) -> "ModelSpec":
    from shoal.config.scenario_kinds import ModelShape
    from shoal.config.setting_tree import Scalar

    return ModelShape(Path.cwd()).read(Scalar(model, ""), "--map")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--reserve: {error}") from None
