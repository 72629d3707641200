"""Which tokens run in the next step: continuous batching with chunked prefill over a paged KV cache. No tensors here.

First come, first served. Running sequences decode first, then prompts are computed in chunks within the step's token
budget, then waiting sequences are admitted. When blocks run out, the youngest running sequence is preempted: it gives
its blocks back and is computed again later, tokens already sent included.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moeray.worker.config import BLOCK_SIZE
from moeray.worker.kv_cache import BlockPool, blocks_for
from moeray.worker.request import Sequence as RequestSequence


@dataclass(frozen=True, slots=True)
class ScheduledItem:
    """`num_tokens` of the sequence, from `num_computed_tokens` on, run in this step."""

    sequence: RequestSequence
    num_tokens: int

    @property
    def wants_token(self) -> bool:
        """Whether the step reaches the sequence's end, so that its next token is sampled."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work; blocks for it are allocated. It stands until it is committed."""

    items: tuple[ScheduledItem, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


@dataclass(frozen=True, slots=True)
class Finished:
    """Why a sequence closed: "stop" (with the token id that did it) or "length"."""

    reason: str
    stop_token_id: int | None = None


class Scheduler:
    """Owns the waiting and running sequences of one worker and the blocks that they use."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_queue: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_queue = max_queue
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: deque[RequestSequence] = deque()
        self.running: list[RequestSequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def refusal(self, sequence: RequestSequence) -> tuple[str, str] | None:
        """(code, message) if the sequence cannot be taken: the queue is full or it can never run; else None."""
        if not sequence.num_prompt_tokens:
            return "invalid", "prompt is empty, must hold at least 1 token"
        longest = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        if longest > self.max_model_len:
            return (
                "invalid",
                f"prompt and max_tokens make {longest} tokens, the limit is {self.max_model_len}",
            )
        if blocks_for(longest) > self.pool.num_blocks:
            return (
                "invalid",
                f"{longest} tokens need {blocks_for(longest)} blocks, there are {self.pool.num_blocks}",
            )
        if sequence.num_output_tokens >= sequence.sampling.max_tokens:
            return (
                "invalid",
                f"{sequence.num_output_tokens} tokens were sent, max_tokens is {sequence.sampling.max_tokens}",
            )
        if len(self.waiting) >= self.max_queue:
            return "queue_full", f"{len(self.waiting)} sequences wait, the limit is {self.max_queue}"
        return None

    def add(self, sequence: RequestSequence) -> None:
        """Queue a sequence that `refusal` did not refuse."""
        self.waiting.append(sequence)

    def abort(self, seq_ids: Collection[str]) -> int:
        """Drop these sequences and free their blocks; returns how many there were."""
        doomed = [seq for seq in (*self.running, *self.waiting) if seq.seq_id in seq_ids]
        if doomed:
            self.running = [seq for seq in self.running if seq.seq_id not in seq_ids]
            self.waiting = deque(seq for seq in self.waiting if seq.seq_id not in seq_ids)
        for sequence in doomed:
            self._free(sequence)
        return len(doomed)

    def abort_all(self) -> int:
        """Drop everything."""
        return self.abort({seq.seq_id for seq in (*self.running, *self.waiting)})

    def schedule(self) -> ScheduledBatch:
        """Decide the next step and allocate its blocks. Empty if there is nothing to do."""
        budget = self.max_num_batched_tokens
        items: dict[RequestSequence, int] = {}
        preempted = False
        decoding = [seq for seq in self.running if seq.num_uncomputed_tokens == 1]
        prefilling = [seq for seq in self.running if seq.num_uncomputed_tokens > 1]
        for sequence in decoding + prefilling:
            if sequence not in self.running:  # preempted by an earlier one
                continue
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if not num_tokens:
                break
            while not self._may_grow(sequence, num_tokens):
                preempted = True
                victim = self.running.pop()
                budget += items.pop(victim, 0)
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                items[sequence] = num_tokens
                budget -= num_tokens
        if not preempted:
            self._admit(items, budget)
        return ScheduledBatch(tuple(ScheduledItem(seq, count) for seq, count in items.items()))

    def _admit(self, items: dict[RequestSequence, int], budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            # The last token is always computed: its logits are what the step is for.
            shared = self.pool.match(sequence.hashes_up_to(sequence.num_tokens - 1)) if self.pool.prefix_caching else []
            needed = blocks_for(sequence.num_tokens) - len(shared)
            if needed > self.pool.num_free_without(shared):
                return
            self.waiting.popleft()
            self.pool.share(shared)
            sequence.block_table = list(shared)
            sequence.num_published = len(shared)
            sequence.num_computed_tokens = len(shared) * BLOCK_SIZE
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            grown = self._may_grow(sequence, num_tokens)
            assert grown, "admission checked that the blocks are there"
            self.running.append(sequence)
            items[sequence] = num_tokens
            budget -= num_tokens

    def _may_grow(self, sequence: RequestSequence, num_tokens: int) -> bool:
        missing = blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_table)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            sequence.block_table.extend(self.pool.allocate(missing))
        return True

    def _preempt(self, sequence: RequestSequence) -> None:
        self._free(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _free(self, sequence: RequestSequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_published = 0

    def commit(self, batch: ScheduledBatch, tokens: Sequence[int]) -> list[Finished | None]:
        """The step ran: advance its sequences and give those that wanted a token theirs, in the batch's order.

        Returns for each of those whether it is finished; finished sequences have left and freed their blocks.
        """
        verdicts: list[Finished | None] = []
        sampled = iter(tokens)
        for item in batch.items:
            sequence = item.sequence
            wants_token = item.wants_token
            sequence.num_computed_tokens += item.num_tokens
            self._publish(sequence)
            if not wants_token:
                continue
            sequence.append(next(sampled))
            verdict = self._verdict(sequence)
            verdicts.append(verdict)
            if verdict is not None:
                self.running.remove(sequence)
                self._free(sequence)
        return verdicts

    def _publish(self, sequence: RequestSequence) -> None:
        if not self.pool.prefix_caching:
            return
        hashes = sequence.hashes_up_to(sequence.num_computed_tokens)
        for index in range(sequence.num_published, len(hashes)):
            self.pool.publish(sequence.block_table[index], hashes[index])
        sequence.num_published = len(hashes)

    def _verdict(self, sequence: RequestSequence) -> Finished | None:
        token, sampling = sequence.token_ids[-1], sequence.sampling
        if sequence.num_output_tokens >= sampling.min_tokens:
            is_eos = token in self.eos_token_ids and not sampling.ignore_eos
            if is_eos or token in sampling.stop_token_ids:
                return Finished("stop", token)
        if sequence.num_output_tokens >= sampling.max_tokens or sequence.num_tokens >= self.max_model_len:
            return Finished("length")
        return None
