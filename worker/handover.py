"""How a leaving worker's sequences find their KV cache where they go on.

While the leaver still decodes, it sends each full block to the slot that will take the sequence, under the block's
prefix name; there it becomes a known prefix. At the switch only the blocks that filled since then are sent, and the
sequence is submitted again with all its tokens: it shares the known blocks and computes the rest of its last one.
Nothing depends on a block's arrival but time.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from moeray.comm.messages import KVBlock
from moeray.worker.kv_cache import BlockPool
from moeray.worker.messages import HandedOverSequence
from moeray.worker.models.paged_cache import PagedKVCache
from moeray.worker.request import Sequence

Send = Callable[[int, KVBlock], bool]


class HandOver:
    """The leaver's side: who goes where, and which blocks are there already."""

    def __init__(self, targets: tuple[int, ...], cache: PagedKVCache, send: Send, done: "Future[int]") -> None:
        """`targets` are slots that stay. `send` must not wait."""
        self.num_blocks = 0
        self._cache = cache
        self._send = send
        self._done = done
        self._tokens_at = dict.fromkeys(targets, 0)
        self._target_of: dict[str, int] = {}
        self._num_copied: dict[str, int] = {}

    def target_of(self, sequence: Sequence) -> int | None:
        """The slot that takes this sequence: the one that takes the fewest tokens so far."""
        if sequence.seq_id not in self._target_of and self._tokens_at:
            target = min(self._tokens_at, key=lambda slot: (self._tokens_at[slot], slot))
            self._tokens_at[target] += sequence.num_tokens
            self._target_of[sequence.seq_id] = target
        return self._target_of.get(sequence.seq_id)

    def copy_one(self, sequences: Iterable[Sequence]) -> bool:
        """Send one block that is full and not sent yet; False if there is none, and then `done` is set."""
        for sequence in sequences:
            copied = self._num_copied.get(sequence.seq_id, 0)
            target = self.target_of(sequence)
            if target is None or copied >= sequence.num_published:
                continue
            payload = self._cache.read_block(sequence.block_table[copied])
            self._send(target, KVBlock(sequence.block_hashes[copied], payload))
            self._num_copied[sequence.seq_id] = copied + 1
            self.num_blocks += 1
            return True
        if not self._done.done():
            self._done.set_result(self.num_blocks)
        return False

    def finish(self, sequences: Iterable[Sequence]) -> list[HandedOverSequence]:
        """Send what filled since, and say where each sequence goes."""
        sequences = list(sequences)
        while self.copy_one(sequences):
            pass
        return [HandedOverSequence(seq.seq_id, seq.attempt, self.target_of(seq)) for seq in sequences]


def keep_block(block: KVBlock, pool: BlockPool, cache: PagedKVCache) -> bool:
    """The receiver's side: store the block as a known prefix; False if it is known already or there is no room."""
    place = pool.adopt(block.name)
    if place is None:
        return False
    cache.write_block(place, block.payload)
    pool.publish(place, block.name)
    pool.release([place])
    return True
