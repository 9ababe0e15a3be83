"""Block counts for ``peak``: blocks of the first, the first two, ... requests while all of them grow."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def running_blocks(tokens: IntArray, order: IntArray, steps: IntArray, size: int) -> IntArray:
    """Blocks that the first i + 1 requests of ``order`` hold after ``steps[i]`` more tokens [draws, n].

    tokens: current tokens of each request, at least 1 [n]. order: indices of requests [draws, n]. steps: for
    each position in ``order`` [draws, n]. size: tokens per block.

    A request with a tokens holds ceil(a / size) blocks; k more tokens add k // size blocks, and one further
    block if the rest of k exceeds the free slots of the last block. The number of requests with a further
    block is a cumulative count for each possible rest. Several counts share a 64-bit word, each in its own
    bit field, so that one cumulative sum computes them all: at this size, numpy calls dominate the time.
    """
    draws, requests = order.shape
    bits = max(1, requests.bit_length())
    increments, shift = _fields(size, bits)
    whole, part = split(tokens + (size - 1), size)
    columns = increments.take(part, axis=1)
    columns[0] = whole
    counts = columns.take(order, axis=1).cumsum(axis=2)
    further, rest = split(steps, size)
    positions = _rows(size, bits, steps.size).take(rest)
    positions += _numbers(draws, requests)
    held: IntArray = counts.ravel().take(positions)
    held >>= shift.take(rest)
    held &= (1 << bits) - 1
    held += counts[0]
    further *= _numbers(1, requests + 1)[0, 1:]
    held += further
    return held


def split(tokens: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """Whole blocks of ``size`` and remaining tokens; shifts are faster than divisions."""
    if size & (size - 1):
        whole, rest = np.divmod(tokens, size)
        return whole, rest
    return tokens >> (size.bit_length() - 1), tokens & (size - 1)


def blocks_in(tokens: IntArray, size: int) -> IntArray:
    """Whole blocks of ``size``, computed in place of ``tokens``."""
    if size & (size - 1):
        tokens //= size
    else:
        tokens >>= size.bit_length() - 1
    return tokens


@lru_cache(maxsize=256)
def _numbers(rows: int, columns: int) -> IntArray:
    """0, 1, 2, ... in row-major order."""
    numbers = np.arange(rows * columns).reshape(rows, columns)
    numbers.flags.writeable = False
    return numbers


@lru_cache(maxsize=64)
def _fields(size: int, bits: int) -> tuple[IntArray, IntArray]:
    """Increments of each word by filled slots of a request [1 + words, size]; the shift of each rest [size].

    Fields have ``bits`` bits; the first row is for whole blocks. A rest of 0 has no further block: its shift
    clears the word.
    """
    per_word = 63 // bits
    rests = np.arange(size)
    word = _words(size, bits)
    shift = np.where(rests > 0, (rests - 1) % per_word * bits, 63)
    increments = np.zeros((int(word[-1]) + 1, size), dtype=np.int64)
    for part in range(size):
        over = rests[size - part :]
        np.add.at(increments[:, part], word[over], np.int64(1) << shift[over])
    return increments, shift


def _words(size: int, bits: int) -> IntArray:
    """The row with the count of each rest [size]."""
    words: IntArray = np.maximum(np.arange(size) - 1, 0) // (63 // bits) + 1
    return words


@lru_cache(maxsize=256)
def _rows(size: int, bits: int, entries: int) -> IntArray:
    """Start of the row of each rest, for rows of ``entries`` [size]."""
    return _words(size, bits) * entries
