"""A sequence at its worker: its tokens, how far the KV cache is, and which blocks hold it."""

from dataclasses import dataclass, field

from moeray.worker.config import BLOCK_SIZE
from moeray.worker.kv_cache import block_hash
from moeray.worker.messages import SamplingParams, Submit


@dataclass(slots=True, eq=False)
class Sequence:
    """One running or waiting sequence.

    `token_ids` are prompt and output so far; the KV cache holds the first `num_computed_tokens` of them.
    `output_counts` counts generated tokens for penalties.
    """

    seq_id: str
    attempt: int
    index: int
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    arrived_at: float
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_cached_tokens: int | None = None
    first_token_sent: bool = False
    output_counts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def from_submit(cls, submit: Submit, *, now: float) -> "Sequence":
        sequence = cls(
            seq_id=submit.seq_id,
            attempt=submit.attempt,
            index=submit.index,
            sampling=submit.sampling,
            token_ids=submit.prompt_ids + submit.output_ids,
            num_prompt_tokens=len(submit.prompt_ids),
            arrived_at=now,
        )
        for token in submit.output_ids:
            sequence.count_output(token)
        return sequence

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def count_output(self, token: int) -> None:
        self.output_counts[token] = self.output_counts.get(token, 0) + 1

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self.count_output(token)

    def hashes_up_to(self, num_tokens: int) -> list[bytes]:
        """Names of the full blocks within the first `num_tokens` tokens."""
        wanted = num_tokens // BLOCK_SIZE
        while len(self.block_hashes) < wanted:
            start = len(self.block_hashes) * BLOCK_SIZE
            parent = self.block_hashes[-1] if self.block_hashes else b""
            self.block_hashes.append(block_hash(parent, self.token_ids[start : start + BLOCK_SIZE]))
        return self.block_hashes[:wanted]
