"""List of the parts of `benchmarks.gpu_check` with time limits and required packages; their environment."""

import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]

_KERNELS = ("torch", "numpy", "triton")
_ENGINES = (
    *("torch", "numpy", "transformers", "tokenizers", "safetensors", "accelerate", "jinja2", "yaml"),
    *("psutil", "msgspec", "zmq", "rich"),
)
_SERVERS = (
    *_ENGINES,
    *("pydantic", "typing_inspection", "annotated_types", "fastapi", "opentelemetry", "starlette"),
    *("uvicorn", "httptools", "httpx", "typer", "prometheus_client"),
)
_DISTRIBUTIONS = {
    "yaml": "PyYAML",
    "zmq": "pyzmq",
    "xdist": "pytest-xdist",
    "pytest_timeout": "pytest-timeout",
    "opentelemetry": "opentelemetry-api",
}
"""Distributions by import name, where the names differ."""

_NO_GPU = "-1"


@dataclass(frozen=True)
class Part:
    """One part.

    module: has ``run(cases)``. seconds: time limit while other parts follow. needs: required packages, by
    import name. optional: packages without which it does less or is slower.
    """

    name: str
    description: str
    module: str
    seconds: float
    needs: tuple[str, ...]
    optional: tuple[str, ...] = ()


PARTS = (
    Part(
        "device", "the card, copies and matrix products", "benchmarks.gpu_check.parts.device", 20, ("torch",)
    ),
    Part(
        "kernels",
        "attention of our kernels beside the reference's",
        "benchmarks.gpu_check.parts.kernels",
        70,
        _KERNELS,
    ),
    Part(
        *(
            "tests",
            "the tests of the executor and of engines, on the device",
            "benchmarks.gpu_check.parts.tests",
            110,
        ),
        needs=(*_ENGINES, "pytest", "hypothesis"),
        optional=("xdist", "pytest_timeout"),
    ),
    Part("times", "times of attention", "benchmarks.gpu_check.parts.times", 55, _KERNELS),
    Part("engines", "decode steps of whole engines", "benchmarks.gpu_check.parts.engines", 90, _ENGINES),
    Part("prompts", "steps of prompts", "benchmarks.gpu_check.parts.prompts", 35, _ENGINES),
    Part("mixed", "three models under load in one engine", "benchmarks.gpu_check.parts.mixed", 50, _ENGINES),
    Part("server", "a burst of chats over HTTP", "benchmarks.gpu_check.parts.server", 50, _SERVERS),
)
"""The most important parts come first."""


def missing(names: Iterable[str]) -> list[str]:
    """Packages that cannot be imported here."""
    return [name for name in names if find_spec(name) is None]


def wheels(names: Collection[str]) -> list[str]:
    """pip requirements of packages, in the versions of constraints.txt."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        pinned[name.lower().replace("-", "_")] = line if version else ""
    distributions = [_DISTRIBUTIONS.get(name, name) for name in names]
    return [pinned.get(each.lower().replace("-", "_"), each) for each in distributions]


def install(folder: Path, target: Path) -> None:
    """Install all wheels of a folder into ``target``, offline; raises CalledProcessError."""
    options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check")
    files = sorted(str(file) for file in folder.glob("*.whl"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), *files], check=True
    )


def visible(given: Mapping[str, str], number: int) -> str:
    """The driver's name of the GPU with this number among the visible ones; "-1" if there is none."""
    listed = given.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return str(number)
    names = listed.split(",") if listed else []
    return names[number] if number < len(names) else _NO_GPU


def environment(
    given: Mapping[str, str], *, gpu: str | None, folders: Iterable[Path], cache: Path
) -> dict[str, str]:
    """Environment of the parts' processes.

    gpu: the only visible one; None: a dry run. folders: further import paths. cache: of Triton.
    """
    kept = {name: value for name, value in given.items() if not name.startswith("PYTEST_")}
    paths = [*map(str, folders), str(ROOT), *filter(None, [given.get("PYTHONPATH")])]
    if find_spec("shoal") is None:
        paths.append(str(ROOT / "src"))
    kept |= {
        "PYTHONPATH": ":".join(paths),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(cache),
        "HF_HUB_OFFLINE": "1",
    }
    if gpu is None:
        return kept | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return kept | {"CUDA_VISIBLE_DEVICES": gpu}
