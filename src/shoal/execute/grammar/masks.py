"""Which tokens may come next in sequences that follow a grammar.

The workers of `grammar_pool` compute it while the model computes the logits: asked before the forward pass,
they answer by its end. A row whose mask is not there by then is postponed: its sequence goes on with the step
after the answer. No step waits for a process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core import Failure
from shoal.execute.grammar.pool import GrammarPool
from shoal.execute.grammar.worker import Question
from shoal.execute.sequences import RunningSequence

PATIENCE_S = 0.001
"""How long a step waits at most for masks that are about to come: less than to compute a row once more."""
_NO_PLACE = Failure("the grammar of the request has no place in this engine")


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Which tokens may come next in some rows of a step."""

    rows: list[int]
    """The rows."""
    bits: np.ndarray
    """uint32 [len(rows), words]: bit b of word w says whether token 32 * w + b may come next."""
    failures: dict[int, Failure]
    """Rows of which it is unknown, and why."""
    postponed: frozenset[int] = frozenset()
    """Rows of which it is not known yet."""


class GrammarMasks:
    """Follows the sequences of one executor, in its thread; but ``ready`` may be asked by another."""

    def __init__(self, pool: GrammarPool) -> None:
        self._pool = pool
        self._questions: dict[int, Question] = {}
        """The latest of each sequence, by its number."""
        self._rows: list[tuple[int, Question]] = []
        """Those of the present step."""

    def begin(self, service: str, rows: Sequence[tuple[int, RunningSequence]]) -> None:
        """Ask for the masks of a step's rows (number and sequence), as far as they have grammars."""
        self._rows = [
            (place, self._ask(service, number, row))
            for place, (number, row) in enumerate(rows)
            if row.sampling.grammar is not None
        ]

    @property
    def complete(self) -> bool:
        """Whether all of them are there."""
        return all(question.done for _, question in self._rows)

    def finish(self) -> RowMasks | None:
        """The masks that were asked for last, as far as they are there; None where there were no grammars."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        with self._pool.answered:
            self._pool.answered.wait_for(lambda: all(question.done for _, question in rows), PATIENCE_S)
        done = [(place, question) for place, question in rows if question.done]
        masks = {place: question.mask for place, question in done if question.mask is not None}
        return RowMasks(
            list(masks),
            np.stack(list(masks.values())) if masks else np.zeros((0, 0), np.uint32),
            {place: question.failure for place, question in done if question.failure is not None},
            frozenset([place for place, _ in rows]) - {place for place, _ in done},
        )

    def leave(self, numbers: Iterable[int]) -> None:
        """Forget sequences."""
        for number in numbers:
            question = self._questions.pop(number, None)
            if question is not None and question.worker is not None:
                question.worker.forget(number)

    def ready(self, numbers: Iterable[int]) -> list[int]:
        """Those sequences whose masks are there, or will not come."""
        questions = self._questions
        return [number for number in numbers if number not in questions or questions[number].done]

    def _ask(self, service: str, number: int, row: RunningSequence) -> Question:
        """What was asked, or is now, about the next token of a sequence."""
        question = self._questions.get(number)
        if question is not None and question.end == len(row.tokens):
            return question  # it was postponed, or its step failed
        assert row.sampling.grammar is not None
        worker = self._pool.find(service, row.sampling.grammar) if question is None else question.worker
        question = self._questions[number] = Question(number, row.tokens, row.prompt_tokens, worker)
        if worker is None:
            question.answer(None, _NO_PLACE)
        else:
            worker.ask(question)
        return question
