"""Who owns which block of the paged KV cache, and which full blocks can be reused for an equal prefix. No tensors here.

A full block is known by a chained hash of all tokens up to its end. Blocks that nobody uses stay findable until they
are needed again, least recently used first (as in vLLM's prefix caching).
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from moeray.worker.config import BLOCK_SIZE

# Block 0 pads block tables and is never handed out.
NULL_BLOCK = 0


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold this many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block that follows the block named `parent` (b"" for the first)."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks 1..num_blocks-1."""

    def __init__(self, num_blocks: int, *, prefix_caching: bool) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 2 (one pads block tables)")
        self.num_blocks = num_blocks - 1
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has checked `num_free`. Their old contents are forgotten."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            forgotten = self._hash_of.pop(block, None)
            if forgotten is not None:
                del self._block_of[forgotten]
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The longest run of known blocks from the start; references are not taken."""
        blocks = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """Free blocks that would be left if these were shared."""
        return len(self._free) - sum(1 for block in blocks if self._references[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of these known blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def adopt(self, name: bytes) -> int | None:
        """A free block for a prefix block that comes from elsewhere; None if it is known or nothing is free.

        The caller writes it, publishes it and gives its reference back.
        """
        if not self.prefix_caching or name in self._block_of or not self._free:
            return None
        return self.allocate(1)[0]

    def publish(self, block: int, name: bytes) -> None:
        """The block is full and its contents are valid: equal prefixes may use it."""
        if self.prefix_caching and name not in self._block_of:
            self._block_of[name] = block
            self._hash_of[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference back; a sequence's last blocks are reused before its first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)
