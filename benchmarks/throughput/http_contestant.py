"""`shoal serve` as a contestant of `benchmarks.throughput`: one stream for each prompt, all at once."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks.throughput.contestants import Failed, last_lines
from benchmarks.throughput.job import Prompts

_POLL_S = 0.05
_EXIT_S = 60


class Served:
    """A server, and a minimal client in this process.

    config: the server's, without its address; the first service is used. facts: of `weights` and `kv`.
    """

    def __init__(self, name: str, config: Mapping[str, Any], facts: Mapping[str, str]) -> None:
        self.name, self._facts = name, facts
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._config = {**config, "server": {"port": self._port}}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - for as long as this lives
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> Mapping[str, Any]:
        """See ``Contestant``; `first_token_s` counts from the start of the process."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump(self._config, file)  # JSON is YAML
            file.flush()
            started = time.perf_counter()
            command = [sys.executable, "-m", "shoal.cli", "serve", "--config", file.name]
            self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._errors)
            self._wait_ready()
        self.run([[1, 2, 3, 4]], 1)
        return {**self._facts, "first_token_s": time.perf_counter() - started}

    def _wait_ready(self) -> None:
        assert self._server is not None
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=1).status_code == 200:
                    return
            except httpx.TransportError:
                if self._server.poll() is not None:
                    raise Failed(f"the server ended: {last_lines(self._errors)}") from None
            time.sleep(_POLL_S)

    def run(self, prompts: Prompts, output: int) -> Mapping[str, Any]:
        started = time.perf_counter()
        tokens = sum(asyncio.run(self._burst(prompts, output)))
        return {"tokens": tokens, "seconds": time.perf_counter() - started}

    async def _burst(self, prompts: Prompts, output: int) -> list[int]:
        return await asyncio.gather(*(self._stream(prompt, output) for prompt in prompts))

    async def _stream(self, prompt: Sequence[int], output: int) -> int:
        """Output tokens of one request, from its last chunk."""
        body = {
            "model": self._config["services"][0]["name"], "prompt": prompt, "max_tokens": output,
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content
        )
        response = await reader.read()
        writer.close()
        counts = re.findall(rb'"completion_tokens":\s*(\d+)', response)
        if not counts:
            raise Failed(response[-300:].decode(errors="replace"))
        return int(counts[-1])

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(_EXIT_S)
