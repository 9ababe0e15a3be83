"""A running process of a tokenizer, as the server sees it: questions and their answers."""

import asyncio
import os
import socket
import sys
from contextlib import suppress
from itertools import count
from typing import Self

import psutil

from shoal.engine.process.child_signals import interrupts_held_back, kill_child
from shoal.models.tokenizer_messages import HEADER

# A process that has no CPU time for so long does not run any more: somebody stopped it.
_PATIENCE_S = 3.0
_LEAST_CPU_S = 0.01
# Answers may have megabytes, and are read in pieces of this size.
_READ_BYTES = 2**20


class ProcessGone(Exception):
    """The process ended before it answered."""


class TokenizerLink:
    """A process, and the questions that it has not answered yet."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader, self._writer = reader, writer
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self.alive = True
        """Whether it may answer."""
        self._reading = asyncio.create_task(self._read(), name=f"tokenizer-{process.pid}")

    @classmethod
    async def start(cls) -> Self:
        """Start a process, which ends when this one does; raises OSError."""
        ours, its_end = socket.socketpair()
        try:
            with its_end, interrupts_held_back():
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "shoal.models.tokenizer.process",
                    str(its_end.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[its_end.fileno()],
                    env=os.environ
                    | {
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                        # It encodes one text at a time: threads of the library would have nothing to do.
                        "TOKENIZERS_PARALLELISM": "false",
                    },
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, *await asyncio.open_connection(sock=ours, limit=_READ_BYTES))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def ask(self, message: bytes) -> bytes:
        """The answer to a question; raises ProcessGone. A process that stands still is killed."""
        if not self.alive:
            raise ProcessGone
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._writer.write(HEADER.pack(number, len(message)))
            self._writer.write(message)
            while True:
                used_s = self._cpu_s()
                await asyncio.wait((answer,), timeout=_PATIENCE_S)
                if answer.done():
                    return answer.result()
                if self._cpu_s() - used_s < _LEAST_CPU_S and not self._reads_a_disk():
                    kill_child(self._process)
        finally:
            del self._asked[number]

    async def aclose(self) -> None:
        """End the process, and wait until it is gone."""
        kill_child(self._process)
        await self._reading

    async def _read(self) -> None:
        try:
            while True:
                number, length = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                message = await self._reader.readexactly(length)
                answer = self._asked.get(number)  # None: nobody waits for it any more
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.alive = False
            kill_child(self._process)
            self._writer.close()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(ProcessGone())
            await self._process.wait()

    def _cpu_s(self) -> float:
        with suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def _reads_a_disk(self) -> bool:
        with suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_DISK_SLEEP)
        return False
