"""The processes that compute which tokens a grammar allows; ``python -m shoal.execute.grammar.process``.

A grammar comes from a client, and some take minutes, gigabytes or the whole stack. So each runs in a process
of its own, which may be killed: a copy (by ``fork``) of one that has read the model's tokenizer already.
`grammar_pool` is the other end.
"""

import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence

import llguidance
import msgspec
import numpy as np
import psutil
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from shoal.core import Grammar, GrammarKind
from shoal.execute.grammar.channel import Channel
from shoal.execute.grammar.messages import (
    COMPILE_CPU_S,
    FORK,
    LOWEST_PRIORITY,
    MEMORY_BYTES,
    Compiled,
    Masked,
    Start,
    Step,
    Told,
)

# Forward passes go first; but rows whose masks come late take part in the next step only.
_MASKS_NICE = 5
# The other end ends who takes longer than allowed; this is for when it is gone.
_GRACE = 2.0
# One space, or a line break and an indentation: JSON as it is usually laid out. Small models that may write
# any space go on doing so.
_WHITESPACE = r"( |\r?\n[ \t]{0,32})"


def compile_grammar(tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """A matcher of outputs from their beginning; raises ValueError or GbnfToLarkError."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            source = llguidance.LLMatcher.grammar_from_json_schema(
                grammar.source, defaults={"whitespace_pattern": _WHITESPACE}
            )
        case GrammarKind.REGEX:
            source = llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            source = any_to_lark(grammar.source)  # from GBNF, too
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    matcher.compute_bitmask()  # the first takes longer than others, and may be what is too much
    _check(matcher)
    _check(_in_object(matcher, tokenizer))
    return matcher


def _in_object(matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """The matcher behind the brace of an object, where that may come first: all properties may follow, which
    are too many for some grammars that begin well."""
    later = matcher.deep_copy()
    brace = tokenizer.tokenize_str("{")
    if later.validate_tokens(brace) == len(brace):
        later.consume_tokens(brace)
    return later


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(_reason(matcher))


def _reason(matcher: llguidance.LLMatcher) -> str:
    return matcher.get_error().replace("<non-verbose/>", "").strip()


class Masks:
    """The sequences that follow one grammar."""

    def __init__(self, start: llguidance.LLMatcher, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._start = start
        self._eos = frozenset(eos_token_ids)
        self._words = -(-vocab_size // 32)
        self._only_end = np.zeros(self._words, dtype=np.uint32)
        for token in eos_token_ids:
            self._only_end[token // 32] |= np.uint32(1 << token % 32)
        self._matchers: dict[int, llguidance.LLMatcher] = {}
        """By number of the sequence; without those that are complete."""
        self._complete: set[int] = set()
        """Sequences that have an end-of-sequence token."""

    def answer(self, step: Step) -> tuple[Masked, np.ndarray]:
        """The answer to one step."""
        for sequence in step.left:
            self._matchers.pop(sequence, None)
            self._complete.discard(sequence)
        masks = np.zeros((len(step.rows), self._words), dtype=np.uint32)
        failures = {}
        for row, told in enumerate(step.rows):
            error = self._fill(masks[row], told)
            if error is not None:
                failures[row] = error
        return Masked(failures), masks

    def _fill(self, mask: np.ndarray, told: Told) -> str | None:
        """Take note of new tokens, and write the mask for the next one; returns why that is impossible."""
        number, tokens = told.sequence, told.tokens
        if number in self._complete or not self._eos.isdisjoint(tokens):
            self._complete.add(number)
            mask[:] = self._only_end
            return None
        matcher = self._matchers.get(number)
        if matcher is None:
            matcher = self._matchers[number] = self._start.deep_copy()
        if tokens:
            matcher.consume_tokens(tokens)
        if matcher.is_error():
            return _reason(matcher)
        if matcher.is_stopped():
            mask[:] = self._only_end
            return None
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            return _reason(matcher)
        return None if mask.any() else "no token can follow"


def _serve(channel: Channel, tokenizer: llguidance.LLTokenizer, eos_token_ids: Sequence[int]) -> None:
    """What the process of one grammar does, until the other end closes the channel."""
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some grammars end in a stack overflow
    channel.send(msgspec.msgpack.encode(os.getpid()))
    start = msgspec.msgpack.decode(channel.receive(), type=Start)
    os.nice(LOWEST_PRIORITY if start.trial else _MASKS_NICE)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)
    try:
        matcher = compile_grammar(tokenizer, start.grammar)
    except (ValueError, GbnfToLarkError) as error:
        channel.send(msgspec.msgpack.encode(Compiled(str(error))))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    channel.send(msgspec.msgpack.encode(Compiled(None)))
    if start.trial:
        return
    masks = Masks(matcher, eos_token_ids, tokenizer.vocab_size)
    decoder = msgspec.msgpack.Decoder(Step)
    while True:
        step = decoder.decode(channel.receive())
        signal.setitimer(signal.ITIMER_PROF, _GRACE * step.cpu_s)
        answer, rows = masks.answer(step)
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.send(msgspec.msgpack.encode(answer))
        channel.send(rows.tobytes())


def _fork(channel: socket.socket, tokenizer: llguidance.LLTokenizer, eos: Sequence[int]) -> bool:
    """Start a process for each connection that the other end sends; False at its end."""
    sign, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if sign != FORK:
        return False
    if os.fork() == 0:
        try:
            channel.close()
            _serve(Channel(socket.socket(fileno=descriptors[0])), tokenizer, eos)
        except (ConnectionError, MemoryError):
            pass  # the other end is gone, or sees that this one is
        finally:
            os._exit(0)
    os.close(descriptors[0])
    return True


def read_tokenizer(file: str, vocab_size: int, end_tokens: Sequence[int]) -> llguidance.LLTokenizer:
    """The tokenizer in ``file``, which may have more tokens than the ``vocab_size`` of its model."""
    try:
        return llguidance.LLTokenizer(file, n_vocab=vocab_size, eos_token=list(end_tokens))
    except ValueError:  # nothing tells how many it has; what is wrong with the file goes wrong again
        return llguidance.LLTokenizer(file, eos_token=list(end_tokens))


def main() -> None:
    """Read the tokenizer of the model in a folder, and then start processes as they are asked for.

    Arguments: the number of the inherited socket, tokenizer.json, size of the vocabulary, end tokens.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies
    number, file, vocab_size, *eos = sys.argv[1:]
    channel = socket.socket(fileno=int(number))
    end_tokens = [int(token) for token in eos]
    tokenizer = read_tokenizer(file, int(vocab_size), end_tokens)
    while _fork(channel, tokenizer, end_tokens):
        pass


if __name__ == "__main__":
    main()
