"""Tokens of simulated sequences: a hash of all tokens before, so that no event of a run changes them.

A request that is preempted, computed in chunks, resumed by another engine or migrated has the same tokens
before each of its tokens as one that ran undisturbed, and so gets the same output. A token that was lost or
repeated on the way changes all that follow.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from shoal.core import NewSequence, StepPlan

_HASH_BYTES = 8


class SimulatedSequence:
    """One sequence, of which only a hash of its tokens is kept.

    words: ids of the tokens that outputs are made of. With a temperature the hash begins with the request's
    seed, so that choices of one prompt differ.
    """

    def __init__(self, joined: NewSequence, words: Sequence[int]) -> None:
        self._words = words
        self._sampling = joined.sampling
        self._outputs = len(joined.tokens) - joined.prompt_tokens
        key = b"" if joined.sampling.greedy else str(joined.seed).encode()
        self._hash = blake2b(array("q", joined.tokens), digest_size=_HASH_BYTES, key=key[:64])

    def sample(self) -> int:
        """Append the next token, and return it."""
        token = self._words[int.from_bytes(self._hash.digest(), "little") % len(self._words)]
        self._hash.update(array("q", (token,)))
        self._outputs += 1
        return token

    def stops_at(self, token: int) -> bool:
        """Whether ``token``, its newest, is one of the request's stop tokens."""
        return token in self._sampling.stop_token_ids and self._sampling.may_stop_at(self._outputs)


class SimulatedTokens:
    """The sequences of an executor. words: of each service, as in SimulatedSequence."""

    def __init__(self, words: Mapping[str, Sequence[int]]) -> None:
        self._words = dict(words)
        self._sequences: dict[int, SimulatedSequence] = {}

    def add_service(self, service: str, words: Sequence[int]) -> None:
        self._words[service] = words

    def remove_service(self, service: str) -> None:
        """Remove a service without sequences."""
        del self._words[service]

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's changes of the batch."""
        for number in plan.left:
            self._sequences.pop(number, None)
        for joined in plan.joined:
            self._sequences[joined.seq_id] = SimulatedSequence(joined, self._words[plan.service])

    def sample(self, plan: StepPlan) -> tuple[list[int], bool]:
        """The next token of each row that samples, and whether one of them ends its output."""
        tokens, ends = [], False
        for row in plan.sampled:
            sequence = self._sequences[plan.seq_ids[row]]
            token = sequence.sample()
            ends = ends or sequence.stops_at(token)
            tokens.append(token)
        return tokens, ends
