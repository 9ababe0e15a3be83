"""Which finished blocks hold which tokens: hashes chained over a prompt, and the index over them.

A block's hash covers its own tokens and, through its parent's hash, everything before them. So equal
hashes mean equal prefixes, and the KV of a block may serve every request that starts the same way.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count, islice

HASH_BYTES = 16


def hash_blocks(tokens: Sequence[int], block_size: int, parent: bytes = b"") -> list[bytes]:
    """Chained hashes of the full blocks of ``tokens``; ``parent`` is the hash of the block before them."""
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
    """What the hash of a first block hangs on: with another salt nothing is equal."""
    if salt is None:
        return b""
    return blake2b(salt.encode(errors="replace"), digest_size=HASH_BYTES, person=b"salt").digest()


def hash_next(parent: bytes, block_tokens: Sequence[int]) -> bytes:
    """The hash of one more full block behind the block with hash ``parent`` (b"" for the first)."""
    return hash_blocks(block_tokens, len(block_tokens), parent)[0]


def hash_synthetic(block_hashes: Sequence[int]) -> list[bytes]:
    """Block hashes of a prompt without tokens, whose equal numbers stand for equal prefixes."""
    return [
        blake2b(str(number).encode(), digest_size=HASH_BYTES, person=b"synthetic").digest()
        for number in block_hashes
    ]


class PrefixIndex:
    """The published blocks of one service, and the order in which cached ones are evicted.

    A published block is either referenced or *cached*: kept although it has no references. Cached blocks
    are ordered by the tick at which they lost their last reference.
    """

    def __init__(self) -> None:
        self.block_of: dict[bytes, int] = {}
        """Published block by hash."""
        self.hash_of: dict[int, bytes] = {}
        """Hash by published block."""
        self.cached: OrderedDict[int, int] = OrderedDict()
        """Tick by cached block, oldest first."""

    def publish(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> bool:
        """Enter referenced blocks; False, and nothing changes, where one of either is known."""
        block_of = dict(zip(hashes, blocks, strict=True))
        known = not (self.block_of.keys().isdisjoint(hashes) and self.hash_of.keys().isdisjoint(blocks))
        if known or len(block_of) < len(blocks):
            return False
        self.block_of |= block_of
        self.hash_of.update(zip(blocks, hashes, strict=True))
        return True

    def rename(self, block: int, target: int) -> None:
        """A referenced block's content has moved: where it is published, it is found at ``target``."""
        block_hash = self.hash_of.pop(block, None)
        if block_hash is not None:
            self.hash_of[target] = block_hash
            self.block_of[block_hash] = target

    def longest_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest leading run of ``hashes`` that is published."""
        blocks = []
        for block_hash in hashes:
            block = self.block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add_cached(self, blocks: Sequence[int], tick: int) -> None:
        """Published blocks lost their last references, the first at ``tick``, each other one later."""
        self.cached.update(zip(blocks, count(tick), strict=False))

    def remove_cached(self, block: int) -> None:
        """A cached block is referenced again."""
        del self.cached[block]

    def oldest(self) -> tuple[int, int] | None:
        """The least recently used cached block and its tick."""
        return next(iter(self.cached.items()), None)

    def evict_oldest(self, most: int, until: int | None) -> list[int]:
        """Evict up to ``most`` cached blocks, oldest first, none of them used after the tick ``until``."""
        blocks = []
        for block, tick in islice(self.cached.items(), most):
            if until is not None and tick > until:
                break
            blocks.append(block)
        for block in blocks:
            del self.cached[block], self.block_of[self.hash_of.pop(block)]
        return blocks

    def evict(self, block: int) -> None:
        """Evict a cached block: it can no longer be found by its hash."""
        del self.cached[block]
        del self.block_of[self.hash_of.pop(block)]
