"""Starts `shoal serve` under a configuration, finds its processes by role, and checks that all end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from benchmarks.chaos.configurations import Configuration

START_S = 240.0
END_S = 60.0
MODULES = {
    "engine": "shoal.engine",
    "grammar": "shoal.execute.grammar.process",
    "tokenizer": "shoal.models.tokenizer.process",
}
"""Modules that processes run, by role."""


class NotStarted(Exception):
    """The server did not become ready, or ended."""


class Server:
    """``shoal serve`` on loopback, as a context manager; all of its processes end with the block."""

    def __init__(self, configuration: Configuration, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.file = folder / f"{configuration.name}.yaml"
        self.log = folder / f"{configuration.name}.log"
        document = configuration.document(port, f"chaos-{os.getpid()}-{port}")
        self.file.write_text(json.dumps(document, indent=1))  # JSON is YAML
        self.url = f"http://127.0.0.1:{port}"
        self.wrong: list[str] = []
        """Errors of its end."""
        self._seen: set[psutil.Process] = set()

    async def __aenter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli", "serve", "--config", str(self.file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C does not reach it
            )
        self.client = httpx.AsyncClient(
            base_url=self.url, timeout=None, limits=httpx.Limits(max_connections=None)
        )
        try:
            async with asyncio.timeout(START_S):
                while not await self._ready():
                    if self._process.poll() is not None:
                        raise NotStarted(self.log.read_text()[-600:])
                    await asyncio.sleep(0.1)
        except TimeoutError:
            await self._end()
            raise NotStarted(f"not ready within {START_S:.0f} s") from None
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _ready(self) -> bool:
        try:
            health = (await self.client.get("/health", timeout=5)).json()
        except (httpx.TransportError, ValueError):
            return False
        return bool(health.get("status") == "ok")

    def processes(self, role: str) -> list[psutil.Process]:
        """Running processes of a role."""
        try:
            self._seen.update(psutil.Process(self._process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            raise NotStarted("the server ended by itself") from None
        return [process for process in self._seen if self._is(process, MODULES[role])]

    @staticmethod
    def _is(process: psutil.Process, module: str) -> bool:
        with contextlib.suppress(psutil.Error):
            return module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
        return False

    async def admin(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Call an admin route; returns status and body."""
        response = await self.client.request(method, f"/admin/{path}", json=body, timeout=60)
        return response.status_code, response.json()

    async def metric(self, name: str, label: str = "") -> int:
        """Sum of a metric over its lines with a label."""
        lines = (await self.client.get("/metrics", timeout=60)).text.splitlines()
        found = [line for line in lines if line.startswith((name + "{", name + " ")) and label in line]
        return round(sum(float(line.rsplit(" ", 1)[1]) for line in found))

    async def _end(self) -> None:
        await self.client.aclose()
        with contextlib.suppress(NotStarted):
            self.processes("engine")
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        if self._process.poll() is None:
            self._process.terminate()
        else:
            self.wrong.append("the server had ended by itself")
        try:
            if status := await asyncio.to_thread(self._process.wait, END_S):
                self.wrong.append(f"the server ended with status {status}")
        except subprocess.TimeoutExpired:
            self.wrong.append(f"the server did not end within {END_S:.0f} s of SIGTERM")
            self._process.kill()
            self._process.wait()
        _, left = await asyncio.to_thread(psutil.wait_procs, self._seen, 20)
        for process in left:
            self.wrong.append(f"a process outlived the server: {process}")
            with contextlib.suppress(psutil.Error):
                process.kill()
