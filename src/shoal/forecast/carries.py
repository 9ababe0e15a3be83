"""Counting, for many requests at once, whose next tokens run over the end of a block."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def count_carries(parts: IntArray, order: IntArray, steps: IntArray, block_size: int) -> IntArray:
    """How many of the first i + 1 requests of ``order`` have part + steps[i] >= block_size [draws, n].

    parts: tokens in each request's last block, less one [n]. order: requests, line by line [draws, n].
    steps: tokens that each of them gets more [draws, n]. All parts and steps lie below ``block_size``.

    One running count for each possible number of steps would do; here as many as fit share a 64-bit word,
    each in a field of its own, so that one cumulative sum runs all of them.
    """
    draws, requests = order.shape
    bits = max(1, requests.bit_length())
    increments, word, shift = _fields(block_size, bits)
    counts = increments[:, parts].take(order, axis=1).cumsum(axis=2)
    places = word.take(steps) * steps.size
    places += np.arange(steps.size).reshape(draws, requests)
    carries: IntArray = counts.ravel().take(places)
    carries >>= shift.take(steps)
    carries &= (1 << bits) - 1
    return carries


@lru_cache(maxsize=64)
def _fields(block_size: int, bits: int) -> tuple[IntArray, IntArray, IntArray]:
    """Where each number of steps has its count, in fields of ``bits`` bits.

    Returns what a request adds to each word, by its part [words, block_size]; and the word and the shift of
    each number of steps [block_size]. No steps, no carries: that shift leaves nothing of a word.
    """
    per_word = 63 // bits
    steps = np.arange(block_size)
    word = np.maximum(steps - 1, 0) // per_word
    shift = np.where(steps > 0, (steps - 1) % per_word * bits, 63)
    increments = np.zeros((int(word[-1]) + 1, block_size), dtype=np.int64)
    for part in range(block_size):
        carrying = steps[block_size - part :]
        np.add.at(increments[:, part], word[carrying], np.int64(1) << shift[carrying])
    return increments, word, shift
