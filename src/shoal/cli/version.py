"""``shoal version``: the version, kernels and CPU features of this machine."""

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated

import typer

import shoal

FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
"""CPU features that kernels use, by Linux's names."""


def version(
    verbose: Annotated[bool, typer.Option(help="Also print what computes here, and on which CPU.")] = False,
) -> None:
    """Print Shoal's version."""
    print_version()
    if verbose:
        from shoal.native import native_status

        typer.echo(f"compute  {native_status()}")
        typer.echo(f"torch    {_version_of('torch')}, transformers {_version_of('transformers')}")
        typer.echo(f"Python   {platform.python_version()} on {platform.system()}")
        typer.echo(f"CPU      {describe_cpu()}")


def print_version() -> None:
    typer.echo(f"shoal {shoal.__version__}")


def describe_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name and its FEATURES; on other systems than Linux only its architecture."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(values.get("flags", "").split())
    features = " ".join(feature for feature in FEATURES if feature in flags)
    name = values.get("model name", platform.machine())
    return f"{name} ({features})" if features else name


def _version_of(package: str) -> str:
    try:
        return installed(package)
    except PackageNotFoundError:
        return "not installed"
