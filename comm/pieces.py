"""How a step's tokens are cut so that each piece fits the buffers, the same way on every rank.

Ranks agree without a word: all see the same step header, and all cut by the same rule.
"""

from collections.abc import Sequence

from moeray.comm.buffers import CommunicationBuffers


class StepPieces:
    """The current step's token counts, and which piece of it the next exchange belongs to."""

    def __init__(self, buffers: CommunicationBuffers, rank: int, size: int) -> None:
        self._buffers = buffers
        self._rank = rank
        self._size = size
        self._next = 0
        self._tokens_of_pieces = [[0] * size]

    def begin_step(self, num_tokens_per_rank: Sequence[int]) -> None:
        """Start over with a step header's counts. Raises `ValueError` for counts that the buffers do not allow."""
        if len(num_tokens_per_rank) != self._size:
            raise ValueError(f"num_tokens_per_rank has {len(num_tokens_per_rank)} entries, must be {self._size}")
        limit = self._buffers.capacity.max_tokens
        if not all(0 <= tokens <= limit for tokens in num_tokens_per_rank):
            raise ValueError(f"num_tokens_per_rank is {list(num_tokens_per_rank)}, must be from 0 to {limit} each")
        piece = self._buffers.piece_tokens
        num_pieces = self._buffers.num_pieces(max(num_tokens_per_rank))
        self._tokens_of_pieces = [
            [min(max(tokens - first * piece, 0), piece) for tokens in num_tokens_per_rank]
            for first in range(num_pieces)
        ]
        self._next = 0

    def slices(self, num_tokens: int) -> list[slice]:
        """This rank's tokens, cut: as many slices as the fullest rank needs, at least one, some of them empty."""
        piece = self._buffers.piece_tokens
        starts = [min(index * piece, num_tokens) for index in range(len(self._tokens_of_pieces))]
        return [slice(start, min(start + piece, num_tokens)) for start in starts]

    def take(self, num_tokens: int) -> list[int]:
        """The most tokens that each rank may send in the next exchange; moves on to the piece after it.

        Raises `ValueError` if this rank has more than it told the others, who have made no room for them.
        """
        tokens_per_rank = self._tokens_of_pieces[self._next]
        if num_tokens > tokens_per_rank[self._rank]:
            raise ValueError(
                f"piece {self._next} has {num_tokens} tokens, the step header allows {tokens_per_rank[self._rank]}"
            )
        self._next = (self._next + 1) % len(self._tokens_of_pieces)
        return tokens_per_rank
