"""The grammar process (``python -m shoal.execute.grammar.process``): compiles a grammar, computes masks.

Grammars come from clients, and some take minutes, gigabytes or the whole stack. So each runs in its own
process, which may be killed: a ``fork`` of one that has read the model's tokenizer. `grammar.worker` is the
other end.
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
    MaskReply,
    SequenceTokens,
    Start,
    Step,
)

# Below forward passes, but not the lowest, since rows with late masks miss a step.
_MASKS_NICE = 5
# The other end kills processes that exceed their CPU time; this limit is for when the other end is gone.
_GRACE = 2.0
# One space, or a line break and an indentation, as in usual JSON. Small models that may write any whitespace
# tend to repeat it forever.
_WHITESPACE = r"( |\r?\n[ \t]{0,32})"


def compile_grammar(tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """A matcher at the beginning of an output; raises ValueError or GbnfToLarkError."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            source = llguidance.LLMatcher.grammar_from_json_schema(
                grammar.source, defaults={"whitespace_pattern": _WHITESPACE}
            )
        case GrammarKind.REGEX:
            source = llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            source = any_to_lark(grammar.source)  # also converts GBNF
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    matcher.compute_bitmask()  # the first takes longest, so it must be within the limits, too
    _check(matcher)
    _check(_in_object(matcher, tokenizer))
    return matcher


def _in_object(matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """The matcher after the brace of an object, if an output may begin with one. All properties may follow
    there, which are too many for some grammars."""
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
        self._end_mask = np.zeros(self._words, dtype=np.uint32)
        for token in eos_token_ids:
            self._end_mask[token // 32] |= np.uint32(1 << token % 32)
        self._matchers: dict[int, llguidance.LLMatcher] = {}
        """By sequence id; without sequences that are complete."""
        self._complete: set[int] = set()
        """Sequences with an end-of-sequence token."""

    def answer(self, step: Step) -> tuple[MaskReply, np.ndarray]:
        """The reply to one step, and its masks."""
        for number in step.left:
            self._matchers.pop(number, None)
            self._complete.discard(number)
        masks = np.zeros((len(step.rows), self._words), dtype=np.uint32)
        failures = {}
        for row, sequence in enumerate(step.rows):
            error = self._fill(masks[row], sequence)
            if error is not None:
                failures[row] = error
        return MaskReply(failures), masks

    def _fill(self, mask: np.ndarray, sequence: SequenceTokens) -> str | None:
        """Consume new tokens and write the mask for the next one; returns an error if that is impossible."""
        number, tokens = sequence.sequence, sequence.tokens
        if number in self._complete or not self._eos.isdisjoint(tokens):
            self._complete.add(number)
            mask[:] = self._end_mask
            return None
        matcher = self._matchers.get(number)
        if matcher is None:
            matcher = self._matchers[number] = self._start.deep_copy()
        if tokens:
            matcher.consume_tokens(tokens)
        if matcher.is_error():
            return _reason(matcher)
        if matcher.is_stopped():
            mask[:] = self._end_mask
            return None
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            return _reason(matcher)
        return None if mask.any() else "no token can follow"


def _serve(channel: Channel, tokenizer: llguidance.LLTokenizer, eos_token_ids: Sequence[int]) -> None:
    """Serve one grammar until the other end closes the channel."""
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
    """Fork a process for the next connection that the other end sends; False if it has closed the channel."""
    sign, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if sign != FORK:
        return False
    if os.fork() == 0:
        try:
            channel.close()
            _serve(Channel(socket.socket(fileno=descriptors[0])), tokenizer, eos)
        except (ConnectionError, MemoryError):
            pass  # the other end is gone, or will notice that this one is
        finally:
            os._exit(0)
    os.close(descriptors[0])
    return True


def read_tokenizer(file: str, vocab_size: int, end_tokens: Sequence[int]) -> llguidance.LLTokenizer:
    """The tokenizer in ``file``, which may have more tokens than the ``vocab_size`` of its model."""
    try:
        return llguidance.LLTokenizer(file, n_vocab=vocab_size, eos_token=list(end_tokens))
    except ValueError:  # it has more tokens, or the file is broken, which raises again
        return llguidance.LLTokenizer(file, eos_token=list(end_tokens))


def main() -> None:
    """Read a model's tokenizer, then fork processes on request.

    Arguments: the number of the inherited socket, tokenizer.json, size of the vocabulary, end tokens.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forked processes are not waited for
    number, file, vocab_size, *eos = sys.argv[1:]
    channel = socket.socket(fileno=int(number))
    end_tokens = [int(token) for token in eos]
    tokenizer = read_tokenizer(file, int(vocab_size), end_tokens)
    while _fork(channel, tokenizer, end_tokens):
        pass


if __name__ == "__main__":
    main()
