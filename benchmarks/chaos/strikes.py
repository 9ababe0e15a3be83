"""Strikes against a server: processes killed or stopped, engines drained, services added and removed."""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import psutil

from benchmarks.chaos.server import Server

GUEST = "guest"
"""A service that is added and removed; it has the weights of ``chat``."""
UNLOADED = "twin"
"""A service that is sometimes unloaded."""


class Strikes:
    """Strikes in random order, each kind equally often.

    between_s: mean time between two. answers: number of answers so far; between the ends of two engines there
    must be some, since loading may take longer than that time.
    """

    def __init__(
        self, server: Server, rng: random.Random, engines: int, between_s: float, answers: Callable[[], int]
    ) -> None:
        self._server, self._rng, self._between_s, self._answers = server, rng, between_s, answers
        self._answers_before = 0
        self.done: Counter[str] = Counter()
        self.failed: list[str] = []
        self.guest = False
        """Whether requests for the guest may be sent."""
        self._kinds: dict[str, Callable[[], Awaitable[bool]]] = {
            "kill engine": lambda: self._signal("engine", signal.SIGKILL),
            "stop engine": lambda: self._signal("engine", signal.SIGSTOP),
            "kill grammar": lambda: self._signal("grammar", signal.SIGKILL),
            "stop grammar": lambda: self._signal("grammar", signal.SIGSTOP),
            "kill tokenizer": lambda: self._signal("tokenizer", signal.SIGKILL),
            "stop tokenizer": lambda: self._signal("tokenizer", signal.SIGSTOP),
            "service": self._toggle_guest,
            "unload": lambda: self._change("POST", f"services/{UNLOADED}/unload"),
        }
        if engines > 1:
            self._kinds["drain"] = self._drain

    async def run(self, end: float) -> None:
        """Strike until ``end``; impossible strikes are skipped."""
        kinds: list[str] = []
        while time.monotonic() < end:
            if not kinds:
                kinds = list(self._kinds)
                self._rng.shuffle(kinds)
            kind = kinds.pop()
            if await self._kinds[kind]():
                self.done[kind] += 1
            await asyncio.sleep(self._between_s * self._rng.uniform(0.5, 1.5))

    async def _signal(self, role: str, number: signal.Signals) -> bool:
        """Signal a process of a role; False without one, or if not all engines are ready."""
        found = self._server.processes(role) if await self._can_signal(role) else []
        with contextlib.suppress(psutil.NoSuchProcess):
            if found:
                self._rng.choice(found).send_signal(number)
                if role == "engine":
                    self._answers_before = self._answers()
                return True
        return False

    async def _can_signal(self, role: str) -> bool:
        if role != "engine":
            return True
        ready = all(state == "ready" for state in (await self._engines()).values())
        return ready and self._answers() > self._answers_before

    async def _engines(self) -> dict[str, str]:
        status, body = await self._server.admin("GET", "engines")
        assert status == 200, body
        return {engine["name"]: engine["state"] for engine in body["data"]}

    async def _drain(self) -> bool:
        name = self._rng.choice(sorted(await self._engines()))
        if not await self._change("POST", f"engines/{name}/drain"):
            return False
        await asyncio.sleep(self._rng.uniform(0.2, 2.0))
        await self._change("POST", f"engines/{name}/undrain")
        return True

    async def _toggle_guest(self) -> bool:
        if self.guest:
            self.guest = not await self._change("DELETE", f"services/{GUEST}")
            return not self.guest
        body = {"name": GUEST, "model": "smollm2", "dtype": "int8"}
        self.guest = await self._change("POST", "services", body)
        return self.guest

    async def _change(self, method: str, path: str, body: object = None) -> bool:
        """Whether the change was accepted; 409 is allowed: it is in progress or not possible now."""
        status, answer = await self._server.admin(method, path, body)
        if status not in (200, 202, 409):
            self.failed.append(f"{method} /admin/{path}: {status} {answer}")
        return status in (200, 202)
