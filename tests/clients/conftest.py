"""A real server, in a process of its own, for clients that know nothing of Shoal.

Nothing here imports ``shoal``: some clients cannot be installed beside it.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# The tests need no network.
os.environ.update(HF_HUB_OFFLINE="1", DO_NOT_TRACK="1", OPENAI_AGENTS_DISABLE_TRACING="1")
# Some clients read a key here if they are given none; the server asks for none.
os.environ.setdefault("OPENAI_API_KEY", "none")

COMMAND = shlex.split(os.environ.get("SHOAL_COMMAND") or str(Path(sys.executable).parent / "shoal"))


@dataclass(frozen=True)
class Server:
    """A running server of smollm2."""

    url: str
    """``http://host:port``, without ``/v1``."""
    model: str = "smollm2"
    """The name of its only service."""

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def shoal_serving(log: Path, *arguments: str) -> Iterator[Server]:
    """``shoal serve`` with ``arguments`` on a free port, stopped at the end; its output is in ``log``."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [*COMMAND, "serve", *arguments, "--port", "0"], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield Server(_url_when_ready(process, log))
    finally:
        process.terminate()
        process.wait(timeout=60)


def _url_when_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The address that the server prints once it takes requests."""
    while process.poll() is None:
        if found := re.search(r"^ready\s+(http://\S+)", log.read_text(), re.MULTILINE):
            return found[1]
        time.sleep(0.1)
    pytest.fail(f"{shlex.join(COMMAND)} did not start:\n{log.read_text()}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with shoal_serving(tmp_path_factory.mktemp("server") / "log.txt", "smollm2") as server:
        yield server


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The folder of smollm2's weights and tokenizer, fetched if need be."""
    command = [*COMMAND, "models", "pull", "smollm2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Path(printed.rpartition(" is at ")[2].strip())


@pytest.fixture(scope="session")
def run_client() -> Callable[..., str]:
    """Runs a client's command of this environment; returns what it printed, and fails with it."""

    def run(*command: str, timeout_s: float = 280) -> str:
        program = Path(sys.executable).parent / command[0]
        ended = subprocess.run(
            [str(program), *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    return run
