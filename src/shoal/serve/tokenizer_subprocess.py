"""The server's side of one tokenizer process: start, messages and replies, stall detection, end."""

import asyncio
import os
import socket
import sys
from contextlib import suppress
from itertools import count
from typing import Self

import psutil

from shoal.engine.process.child_signals import interrupts_held_back, kill_child
from shoal.models.tokenizer.messages import HEADER

# A process that uses no CPU time for this long is stopped, for example by SIGSTOP.
_STALL_TIMEOUT_S = 3.0
_LEAST_CPU_S = 0.01
# Replies may have megabytes, and are read in pieces of this size.
_READ_BYTES = 2**20


class SubprocessEnded(Exception):
    """The tokenizer process ended before it replied."""


class TokenizerSubprocess:
    """A tokenizer process, and its pending messages."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader, self._writer = reader, writer
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self.alive = True
        """Whether it may still reply."""
        self._reading = asyncio.create_task(self._read(), name=f"tokenizer-{process.pid}")

    @classmethod
    async def start(cls) -> Self:
        """Start a process, which ends with this one; raises OSError."""
        own_end, child_end = socket.socketpair()
        try:
            with child_end, interrupts_held_back():
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "shoal.models.tokenizer.process",
                    str(child_end.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[child_end.fileno()],
                    env=os.environ
                    | {
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                        # It encodes one text at a time: the library's threads would be idle.
                        "TOKENIZERS_PARALLELISM": "false",
                    },
                )
        except BaseException:
            own_end.close()
            raise
        return cls(process, *await asyncio.open_connection(sock=own_end, limit=_READ_BYTES))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, message: bytes) -> bytes:
        """The reply to ``message``; raises SubprocessEnded. A stalled process is killed."""
        if not self.alive:
            raise SubprocessEnded
        number = next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[number] = reply
        try:
            self._writer.write(HEADER.pack(number, len(message)))
            self._writer.write(message)
            while True:
                used_s = self._cpu_s()
                await asyncio.wait((reply,), timeout=_STALL_TIMEOUT_S)
                if reply.done():
                    return reply.result()
                if self._cpu_s() - used_s < _LEAST_CPU_S and not self._waits_for_disk():
                    kill_child(self._process)
        finally:
            del self._pending[number]

    async def aclose(self) -> None:
        """End the process, and wait for its exit."""
        kill_child(self._process)
        await self._reading

    async def _read(self) -> None:
        try:
            while True:
                number, length = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                message = await self._reader.readexactly(length)
                reply = self._pending.get(number)  # None: its ``ask`` was cancelled
                if reply is not None and not reply.done():
                    reply.set_result(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.alive = False
            kill_child(self._process)
            self._writer.close()
            for reply in self._pending.values():
                if not reply.done():
                    reply.set_exception(SubprocessEnded())
            await self._process.wait()

    def _cpu_s(self) -> float:
        with suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def _waits_for_disk(self) -> bool:
        with suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_DISK_SLEEP)
        return False
