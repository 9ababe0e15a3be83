"""GPU check, part `server`: bursts of chats to `shoal serve` on this machine.

The model has random weights, and a generated tokenizer with one token per word.
"""

import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.cases import Cases, Figures, quantile
from benchmarks.gpu_check.shapes import LLAMA_1B, TINY, VOCABULARY, Llama

BURSTS = ((1, 64), (64, 64), (256, 64))
"""Concurrent chats, and output tokens of each."""
TINY_BURSTS = ((1, 4), (4, 8))
_PROMPT_WORDS = 100
_POLL_S = 0.1
_ANSWER_S = 60
_EXIT_S = 10
_TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def run(cases: Cases) -> None:
    model, bursts = (TINY[0], TINY_BURSTS) if cases.tiny else (LLAMA_1B, BURSTS)
    kv_bytes = max(model.kv_bytes(streams, 2 * _PROMPT_WORDS + output) for streams, output in bursts)
    with tempfile.TemporaryDirectory() as folder:
        server = _Server(model, cases.device, kv_bytes, Path(folder))
        try:
            cases.run("start", server.start, seconds=0 if cases.tiny else 15, line="ready in {seconds:.1f} s")
            for streams, output in bursts:
                line = f"{streams} at once {{tokens/s:,.0f}} tokens/s, TTFT {{TTFT p50, ms:.0f}} ms"
                cases.run(
                    f"{streams} at once", partial(server.measure, streams, output), seconds=0, line=line
                )
        finally:
            server.end()


def write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer, and a chat template that joins the messages' texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))


@dataclass(frozen=True)
class _Answer:
    """first_s, last_s: from the start to the first and last text."""

    tokens: int
    first_s: float
    last_s: float


class _Server:
    """`shoal serve` with one model on a free port."""

    def __init__(self, model: Llama, device: str, kv_bytes: int, folder: Path) -> None:
        self._name = model.name
        where = model.write(folder)
        write_tokenizer(where)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        service = {"name": model.name, "model": str(where), "weights": "random", "dtype": "bfloat16"}
        config = {
            "devices": [device],
            "kv_cache": {"memory": kv_bytes},
            "scheduler": {"preemption_mode": "recompute"},
            "services": [service],
            "server": {"host": "127.0.0.1", "port": self._port},
        }
        self._config = folder / "shoal.yaml"
        self._config.write_text(json.dumps(config))  # JSON is YAML
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Figures:
        """Start the server, and wait until it is ready."""
        started = time.perf_counter()
        command = [sys.executable, "-m", "shoal.cli", "serve", "--config", str(self._config)]
        self._process = subprocess.Popen(command)
        while not self._is_ready():
            if (status := self._process.poll()) is not None:
                raise RuntimeError(f"the server ended with status {status}")
            time.sleep(_POLL_S)
        return {"seconds": time.perf_counter() - started}

    def measure(self, streams: int, output: int) -> Figures:
        """A burst of ``streams`` chats with ``output`` tokens each, after a short warm-up burst."""
        self._burst(streams, 2)
        started = time.perf_counter()
        answers = self._burst(streams, output)
        seconds = time.perf_counter() - started
        if any(answer.tokens != output for answer in answers):
            raise AssertionError(f"{output} tokens each were asked for, not {[a.tokens for a in answers]}")
        figures: dict[str, float | str] = {"tokens/s": streams * output / seconds}
        times = {
            "TTFT": [answer.first_s for answer in answers],
            "TPOT": [(answer.last_s - answer.first_s) / (output - 1) for answer in answers],
        }
        for name, each in times.items():
            for share in (50, 99):
                figures[f"{name} p{share}, ms"] = 1e3 * quantile(each, share / 100)
        return figures

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _burst(self, streams: int, output: int) -> list[_Answer]:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError("the server is not running")
        with ThreadPoolExecutor(streams) as pool:
            return list(pool.map(self._chat, [output] * streams))

    def _chat(self, output: int) -> _Answer:
        text = " ".join(f"w{random.randrange(2, VOCABULARY)}" for _ in range(_PROMPT_WORDS))
        body = {
            "model": self._name,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        tokens, times = 0, []
        for chunk in self._chunks(body):
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                times.append(time.perf_counter() - started)
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
        return _Answer(tokens, times[0], times[-1])

    def _chunks(self, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read()[:200]!r}")
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                yield json.loads(data)
        connection.close()
