"""Which tokens may come next in sequences that follow a grammar.

The processes of `grammar_pool` compute it while the model computes the logits: asked before the forward pass,
they answer by its end. What they know follows from the output tokens, so that sequences which come back
after a preemption, or from another engine, are told to them from the beginning.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import msgspec
import numpy as np

from shoal.core import Failure, FinishReason, Grammar, InvalidRequest, QueueFull
from shoal.execute.grammar_messages import Masked, Step, Told
from shoal.execute.grammar_pool import GrammarPool, GrammarProcess
from shoal.execute.group import RunningSequence

PATIENCE_S = 0.015
"""How long a step waits for masks. Processes that have used up their share of as much CPU time by then are
killed; those that were not given it are waited for."""
_LONGEST_WAIT_S = 10.0
_RESTART_TIMEOUT_S = 1.0
_TOO_SLOW = Failure("the grammar takes too long: its next token could not be found in time; simplify it")


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Which tokens may come next in some rows of a step."""

    rows: list[int]
    """The rows."""
    bits: np.ndarray
    """uint32 [len(rows), words]: bit b of word w says whether token 32 * w + b may come next."""
    failures: dict[int, Failure]
    """Rows of which it is unknown, and why."""


@dataclass(slots=True)
class _Sequence:
    """One that follows a grammar."""

    process: GrammarProcess
    """Computes its masks."""
    told: int = 0
    """Output tokens that the process knows."""


@dataclass(slots=True)
class _Question:
    """What one process was asked."""

    process: GrammarProcess
    rows: list[int] = field(default_factory=list)
    """Rows of the step."""
    step: Step = field(default_factory=lambda: Step([], []))
    used_ns: int = 0
    """CPU time of the process before."""


class GrammarMasks:
    """Follows the sequences of one executor."""

    def __init__(self, pool: GrammarPool) -> None:
        self._pool = pool
        self._sequences: dict[int, _Sequence] = {}
        """By number."""
        self._asked: list[_Question] = []
        self._failures: dict[int, Failure] = {}

    def begin(self, service: str, rows: Sequence[tuple[int, RunningSequence]]) -> None:
        """Ask for the masks of a step's rows (number and sequence), as far as they have grammars."""
        if self._asked:
            self.finish()  # of a step that failed: nobody has read the answers
        self._failures = {}
        questions: dict[int, _Question] = {}
        for place, (number, row) in enumerate(rows):
            if row.sampling.grammar is None:
                continue
            try:
                sequence = self._follow(service, number, row)
            except (InvalidRequest, QueueFull) as error:
                self._failures[place] = Failure(str(error))
                continue
            question = questions.setdefault(sequence.process.pid, _Question(sequence.process))
            question.rows.append(place)
            question.step.rows.append(Told(number, row.tokens[row.prompt_tokens + sequence.told :]))
            sequence.told = row.output_tokens
        self._asked = [question for question in questions.values() if self._ask(question)]

    def finish(self) -> RowMasks | None:
        """Wait for the masks that were asked for last; None where there were no grammars."""
        asked, self._asked = self._asked, []
        if not asked and not self._failures:
            return None
        waiting = {question.process.connection: question for question in asked}
        rows: list[int] = []
        bits: list[np.ndarray] = []
        begun = time.monotonic()
        while waiting:
            for connection in wait(list(waiting), PATIENCE_S):
                assert isinstance(connection, Connection)
                question = waiting.pop(connection)
                masks = self._receive(question)
                if masks is not None:
                    good = [at for at, row in enumerate(question.rows) if row not in self._failures]
                    rows += [question.rows[at] for at in good]
                    bits.append(masks[good])
            if time.monotonic() - begun >= PATIENCE_S:
                self._end_slow(waiting, time.monotonic() - begun >= _LONGEST_WAIT_S)
        return RowMasks(rows, np.concatenate(bits) if bits else np.zeros((0, 0), np.uint32), self._failures)

    def leave(self, numbers: Iterable[int]) -> None:
        """Forget sequences."""
        for number in numbers:
            sequence = self._sequences.pop(number, None)
            if sequence is not None:
                sequence.process.sequences.discard(number)
                sequence.process.left.append(number)

    def _follow(self, service: str, number: int, row: RunningSequence) -> _Sequence:
        """The sequence; one that is new begins to follow its grammar."""
        sequence = self._sequences.get(number)
        if sequence is None:
            assert row.sampling.grammar is not None
            process = self._prepared(service, row.sampling.grammar)
            process.sequences.add(number)
            sequence = self._sequences[number] = _Sequence(process)
        return sequence

    def _prepared(self, service: str, grammar: Grammar) -> GrammarProcess:
        """The process of a grammar, which runs unless it had to make room for others meanwhile."""
        try:
            return self._pool.prepare(service, grammar).result(_RESTART_TIMEOUT_S)
        except TimeoutError:
            raise QueueFull("the grammar had to make room for others; try again", 1.0) from None

    def _ask(self, question: _Question) -> bool:
        """Send a question; False if its process is gone."""
        process = question.process
        question.step.left.extend(process.left)
        process.left.clear()
        question.used_ns = _cpu_ns(process)
        try:
            process.connection.send_bytes(msgspec.msgpack.encode(question.step))
        except OSError:
            self._end(question, Failure("the grammar's process ended"))
            return False
        return True

    def _receive(self, question: _Question) -> np.ndarray | None:
        """Masks [len(question.rows), words]; None if the process is gone."""
        connection = question.process.connection
        try:
            answer = msgspec.msgpack.decode(connection.recv_bytes(), type=Masked)
            masks = np.frombuffer(connection.recv_bytes(), dtype=np.uint32)
        except (EOFError, OSError):
            self._end(question, _TOO_SLOW)
            return None
        for at, error in answer.failures.items():
            why = f"the grammar allows no further token: {error}"
            self._failures[question.rows[at]] = Failure(why, FinishReason.INVALID)
        return masks.reshape(len(question.rows), -1)

    def _end_slow(self, waiting: dict[Connection, _Question], all_of_them: bool) -> None:
        """Kill those that have used up their share of the time."""
        share_ns = PATIENCE_S * 1e9 / max(1, len(waiting))
        for connection, question in list(waiting.items()):
            if all_of_them or _cpu_ns(question.process) - question.used_ns > share_ns:
                del waiting[connection]
                self._end(question, _TOO_SLOW)

    def _end(self, question: _Question, error: Failure) -> None:
        """Kill a process; its rows have no masks, and its other sequences begin anew in another."""
        process = question.process
        self._pool.end(process)
        for row in question.rows:
            self._failures[row] = error
        for number in process.sequences:
            self._sequences.pop(number, None)


def _cpu_ns(process: GrammarProcess) -> int:
    """CPU time that a process has used; 0 if it is gone, or the system does not tell."""
    try:
        with open(f"/proc/{process.pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[0])
    except OSError:
        return 0
