"""What README.md and examples/README.md tell a newcomer to run works as written."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from at_hand import bundled_model, free_port

ROOT = Path(__file__).parents[2]
MODELS = ("smollm2", "gemma3-270m")
URL = "http://127.0.0.1:8000"
NOT_RUN = ("make ", "export ", ". .venv/")
"""The start of lines that set up, which the checks of a fresh clone run."""
LASTING = ("serve", "chat")
"""Commands that go on until they are stopped."""
TRIED_ELSEWHERE = ("profile",)
"""Takes a minute with a bundled model; tests/cli/test_cli_profile.py runs it with a tiny one."""
LESS = {
    "generate": {"--max-tokens": "16"},
    "plan": {"--requests": "400", "--trials": "2"},
    "static": {"--max-tokens": "16"},
    "tune": {"--trials": "4"},
}
"""Flags of commands that take long, with which they do the same in less time."""

pytestmark = pytest.mark.slow


def blocks(page: str, language: str) -> list[str]:
    """The code of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def shell_lines(*pages: str) -> list[list[str]]:
    """The words of each command of the pages, once."""
    text = "".join(block for page in pages for block in blocks(page, "sh")).replace("\\\n", " ")
    lines = [line for line in re.split(r"\n(?![ ])", text) if line and not line.startswith(NOT_RUN)]
    commands = dict.fromkeys(tuple(shlex.split(line, comments=True)) for line in lines)
    return [list(words) for words in commands]


SHOAL = [words[1:] for words in shell_lines("README.md", "examples/README.md") if words[0] == "shoal"]
CURL = [words for words in shell_lines("README.md") if words[0] == "curl"]
ENDING = [words for words in SHOAL if words[0] not in (*LASTING, *TRIED_ELSEWHERE)]
SERVING = [words for words in SHOAL if words[0] == "serve"]


def with_less(words: list[str]) -> list[str]:
    """A command, with the flags of ``LESS`` in place of its own."""
    for flag, value in LESS.get(words[0], {}).items():
        at = words.index(flag) if flag in words else len(words)
        words = [*words[:at], flag, value, *words[at + 2 :]]
    return words


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory that has the examples."""
    for model in MODELS:
        bundled_model(model)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@contextmanager
def serving(arguments: list[str], folder: Path) -> Iterator[str]:
    """The URL of a server that was started with some arguments."""
    port = free_port()
    command = [sys.executable, "-m", "shoal.cli", *arguments, "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _healthy(url):
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def test_the_pages_have_commands_of_each_kind() -> None:
    assert {words[0] for words in SHOAL} >= {
        "serve",
        "generate",
        "simulate",
        "tune",
        "plan",
        "place",
    }
    assert [len(CURL), len(blocks("README.md", "python"))] == [1, 2]


@pytest.mark.parametrize("words", ENDING, ids=" ".join)
def test_a_command_that_ends_does_so_well(words: list[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli", *with_less(words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for flag, name in pairwise(words):
        if flag in ("--out", "--json"):
            assert (folder / name).exists()


@pytest.mark.parametrize("words", SERVING, ids=" ".join)
def test_a_server_starts_and_answers(words: list[str], folder: Path) -> None:
    with serving(words, folder) as url:
        names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        for name in names:
            body = {"model": name, "prompt": "Water boils at", "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == httpx.codes.OK, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4


def test_the_requests_of_the_page_are_answered(folder: Path) -> None:
    [curl], [client, _] = CURL, blocks("README.md", "python")
    with serving(SERVING[0], folder) as url:
        words = [word.replace(URL, url) for word in curl]
        done = subprocess.run([words[0], "-sS", *words[1:]], capture_output=True, text=True, timeout=120)
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]
        program = client.replace(URL, url)
        assert program != client
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr


def test_the_python_of_the_page_runs(folder: Path) -> None:
    _, program = blocks("README.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "Water boils at" in done.stdout


def test_the_image_is_made_of_what_is_here() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    names = [name for line in copied for name in line.split()]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {"src", "pyproject.toml", "README.md"} <= set(names)
    for name in names:
        assert (ROOT / name).exists()
        assert f"!{name}" in allowed
