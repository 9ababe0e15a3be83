"""The parts of `benchmarks/gpu_check`, and the packages that they need."""

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
    *("pydantic", "fastapi", "starlette", "uvicorn", "httptools", "httpx", "typer", "prometheus_client"),
)
_DISTRIBUTIONS = {
    "yaml": "PyYAML",
    "zmq": "pyzmq",
    "xdist": "pytest-xdist",
    "pytest_timeout": "pytest-timeout",
}
"""Names of distributions that are not those of what is imported."""


_NO_GPU = "-1"


@dataclass(frozen=True)
class Part:
    """One part.

    name, does: for people. module: which has ``run(cases)``. seconds: that it gets at most, while others are
    to come. needs: what it imports. does_without: what it can do without, and then does less or is slower.
    """

    name: str
    does: str
    module: str
    seconds: float
    needs: tuple[str, ...]
    does_without: tuple[str, ...] = ()


PARTS = (
    Part(
        "device", "the card, copies and matrix products", "benchmarks.gpu_check.parts.device", 25, ("torch",)
    ),
    Part(
        "kernels",
        "attention of our kernels beside the reference's",
        "benchmarks.gpu_check.parts.kernels",
        60,
        _KERNELS,
    ),
    Part(
        *(
            "tests",
            "the tests of the executor and of engines, on the device",
            "benchmarks.gpu_check.parts.tests",
            75,
        ),
        needs=(*_ENGINES, "pytest", "hypothesis"),
        does_without=("xdist", "pytest_timeout"),
    ),
    Part("times", "times of attention", "benchmarks.gpu_check.parts.times", 55, _KERNELS),
    Part("engines", "decode steps of whole engines", "benchmarks.gpu_check.parts.engines", 125, _ENGINES),
    Part("prompts", "steps of prompts", "benchmarks.gpu_check.parts.prompts", 45, _ENGINES),
    Part("mixed", "three models under load in one engine", "benchmarks.gpu_check.parts.mixed", 50, _ENGINES),
    Part("server", "a burst of chats over HTTP", "benchmarks.gpu_check.parts.server", 45, _SERVERS),
)
"""The more a part is worth, the earlier it comes."""


def missing(names: Iterable[str]) -> list[str]:
    """Those of some packages that cannot be imported here."""
    return [name for name in names if find_spec(name) is None]


def wheels(names: Collection[str]) -> list[str]:
    """What to give to pip for packages, in the versions that this code is tested with."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        pinned[name.lower().replace("-", "_")] = line if version else ""
    distributions = [_DISTRIBUTIONS.get(name, name) for name in names]
    return [pinned.get(each.lower().replace("-", "_"), each) for each in distributions]


def install(folder: Path, target: Path) -> None:
    """Put all wheels of a folder into ``target``, without a network; raises CalledProcessError."""
    options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check")
    files = sorted(str(file) for file in folder.glob("*.whl"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), *files], check=True
    )


def visible(given: Mapping[str, str], number: int) -> str:
    """What the driver calls a GPU, or a name of none; number: among those that may be used."""
    listed = given.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return str(number)
    names = listed.split(",") if listed else []
    return names[number] if number < len(names) else _NO_GPU


def environment(
    given: Mapping[str, str], *, gpu: str | None, folders: Iterable[Path], cache: Path
) -> dict[str, str]:
    """The environment of the parts' processes.

    gpu: the only one that they see; None for a dry run. folders: where else to import from. cache: of Triton.
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
