"""Prefix cache: chained block hashes, and the index of cached blocks with LRU eviction.

A block's hash covers its own tokens and, through its parent's hash, all tokens before them. So equal
hashes mean equal prefixes, and the KV of a block can be shared by all requests with that prefix.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count, islice

HASH_BYTES = 16


def hash_blocks(tokens: Sequence[int], block_size: int, parent: bytes = b"") -> list[bytes]:
    """Chained hashes of the full blocks of ``tokens``; ``parent``: hash of the block before them."""
    data = memoryview(array("q", tokens).tobytes())
    step = 8 * block_size
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        digest = blake2b(parent, digest_size=HASH_BYTES)
        digest.update(data[start : start + step])
        parent = digest.digest()
        hashes.append(parent)
    return hashes


def hash_salt(salt: str | None) -> bytes:
    """Parent hash of a first block: prefixes with different salts are never equal."""
    if salt is None:
        return b""
    return blake2b(salt.encode(errors="replace"), digest_size=HASH_BYTES, person=b"salt").digest()


def hash_next(parent: bytes, block_tokens: Sequence[int]) -> bytes:
    """The hash of the full block after the block with hash ``parent`` (b"" for the first)."""
    return hash_blocks(block_tokens, len(block_tokens), parent)[0]


def hash_synthetic(block_hashes: Sequence[int]) -> list[bytes]:
    """Block hashes of a synthetic prompt; equal numbers mean equal prefixes."""
    return [
        blake2b(str(number).encode(), digest_size=HASH_BYTES, person=b"synthetic").digest()
        for number in block_hashes
    ]


class PrefixIndex:
    """The published blocks of one service, and the eviction order of cached ones.

    A published block is either referenced or *cached*: kept without references. Cached blocks are ordered by
    the tick at which they lost their last reference.
    """

    def __init__(self) -> None:
        self.block_of: dict[bytes, int] = {}
        """Published block by hash."""
        self.hash_of: dict[int, bytes] = {}
        """Hash by published block."""
        self.cached: OrderedDict[int, int] = OrderedDict()
        """Tick by cached block, oldest first."""

    def publish(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> bool:
        """Add referenced blocks; False, and nothing changes, if a block or hash is already known."""
        block_of = dict(zip(hashes, blocks, strict=True))
        known = not (self.block_of.keys().isdisjoint(hashes) and self.hash_of.keys().isdisjoint(blocks))
        if known or len(block_of) < len(blocks):
            return False
        self.block_of |= block_of
        self.hash_of.update(zip(blocks, hashes, strict=True))
        return True

    def rename(self, block: int, target: int) -> None:
        """The content of a referenced block has moved to ``target``."""
        block_hash = self.hash_of.pop(block, None)
        if block_hash is not None:
            self.hash_of[target] = block_hash
            self.block_of[block_hash] = target

    def longest_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest published prefix of ``hashes``."""
        blocks = []
        for block_hash in hashes:
            block = self.block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add_cached(self, blocks: Sequence[int], tick: int) -> None:
        """Published blocks have lost their last references, at successive ticks starting with ``tick``."""
        self.cached.update(zip(blocks, count(tick), strict=False))

    def remove_cached(self, block: int) -> None:
        del self.cached[block]

    def oldest(self) -> tuple[int, int] | None:
        """The least recently used cached block and its tick."""
        return next(iter(self.cached.items()), None)

    def evict_oldest(self, count: int, until: int | None) -> list[int]:
        """Evict up to ``count`` cached blocks, oldest first, except those used after the tick ``until``."""
        blocks = []
        for block, tick in islice(self.cached.items(), count):
            if until is not None and tick > until:
                break
            blocks.append(block)
        for block in blocks:
            del self.cached[block], self.block_of[self.hash_of.pop(block)]
        return blocks

    def evict(self, block: int) -> None:
        del self.cached[block]
        del self.block_of[self.hash_of.pop(block)]
