"""Contestants of `benchmarks.throughput`: engine processes that run jobs on request, and pairs of them."""

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Protocol

from benchmarks.throughput.job import Prompts
from shoal.core import ModelUnavailable

_LAST_LINES = 3
_TIMEOUT_S = 900.0


class Failed(Exception):
    """A contestant cannot start, or cannot run a job."""


class Contestant(Protocol):
    """An engine under test."""

    name: str

    def start(self) -> Mapping[str, Any]:
        """Load the model; returns facts: `version`, precision of `weights` and of `kv`. Raises Failed."""

    def run(self, prompts: Prompts, output: int) -> Mapping[str, Any]:
        """Run a job; returns its `tokens` and `seconds`. Raises Failed."""

    def close(self) -> None:
        """End its processes."""


def last_lines(errors: IO[str]) -> str:
    """The last lines of a process's standard error."""
    errors.seek(0)
    return " / ".join(errors.read().split("\n")[-1 - _LAST_LINES :])


class Runner:
    """A contestant in its own process, which runs a module of this folder.

    python: interpreter. setup: its first message, with the fact `weights`. cores: empty: all. environment:
    additional variables.
    """

    def __init__(
        self,
        name: str,
        python: str,
        module: str,
        setup: Callable[[], Mapping[str, Any]],
        *,
        cores: Collection[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._command = [python, "-m", f"benchmarks.throughput.{module}"]
        self._setup = setup
        self._cores = cores or os.sched_getaffinity(0)
        self._environment = {**os.environ, **(environment or {})}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - for as long as this lives
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Mapping[str, Any]:
        try:
            setup = {**self._setup(), "threads": len(self._cores)}
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
            )
        except (ModelUnavailable, OSError) as error:
            raise Failed(str(error)) from None
        return {"weights": setup["weights"], **self._ask(setup)}

    def run(self, prompts: Prompts, output: int) -> Mapping[str, Any]:
        return self._ask({"prompts": prompts, "output": output})

    def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(message), file=process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(f"it ended: {last_lines(self._errors)}") from None
        readable, _, _ = select.select([process.stdout], [], [], _TIMEOUT_S)
        if not readable:
            self.close()
            raise Failed(f"no answer in {_TIMEOUT_S:g} s")
        line = process.stdout.readline()
        if not line:
            raise Failed(f"it ended: {last_lines(self._errors)}")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


class Pair:
    """Two contestants that run at once, with alternating prompts."""

    def __init__(self, name: str, one: Contestant, other: Contestant) -> None:
        self.name = name
        self._members = (one, other)

    def start(self) -> Mapping[str, Any]:
        facts = [member.start() for member in self._members]
        return facts[0]

    def run(self, prompts: Prompts, output: int) -> Mapping[str, Any]:
        started = time.perf_counter()
        with ThreadPoolExecutor(2) as threads:
            jobs = [
                threads.submit(member.run, prompts[number::2], output)
                for number, member in enumerate(self._members)
            ]
            tokens = sum(job.result()["tokens"] for job in jobs)
        return {"tokens": tokens, "seconds": time.perf_counter() - started}

    def close(self) -> None:
        for member in self._members:
            member.close()
