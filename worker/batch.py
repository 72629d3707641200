"""From a scheduled batch to the model's input tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeray.worker.config import BLOCK_SIZE
from moeray.worker.models.attention_plan import WindowPlan, decode_groups, plan_to, prefill_segment
from moeray.worker.models.config import KeyWindow
from moeray.worker.models.model import ForwardBatch
from moeray.worker.models.paged_cache import PagedKVCache
from moeray.worker.scheduler import ScheduledBatch, ScheduledItem


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A forward batch and the items that get a token, in the order of its logits rows (which is the batch's own)."""

    forward: ForwardBatch
    sampled: list[ScheduledItem]


def prepare_batch(batch: ScheduledBatch, cache: PagedKVCache) -> PreparedBatch:
    """Lay the step's rows out: single tokens first, by context length, then chunks of prompts. It may be empty."""
    singles = sorted(
        (item for item in batch.items if item.num_tokens == 1),
        key=lambda item: item.sequence.num_computed_tokens,
    )
    chunks = [item for item in batch.items if item.num_tokens > 1]
    ordered = singles + chunks
    starts = np.cumsum([0] + [item.num_tokens for item in ordered])
    last_row = {id(item): int(end) - 1 for item, end in zip(ordered, starts[1:], strict=True)}
    chunk_starts = [int(start) for start in starts[len(singles) : -1]]
    plan = {
        window: plan_to(_window_plan(singles, chunks, chunk_starts, cache, window), cache.device, cache.dtype)
        for window in {shape.window for shape in cache.shapes}
    }
    sampled = [item for item in batch.items if item.wants_token]
    tokens, positions, slots = _rows(ordered)
    device = cache.device
    forward = ForwardBatch(
        token_ids_T=torch.from_numpy(tokens).to(device),
        positions_T=torch.from_numpy(positions).to(device),
        slots_T=torch.from_numpy(slots).to(device),
        logits_rows_S=torch.tensor([last_row[id(item)] for item in sampled], dtype=torch.int64, device=device),
        attention=plan,
    )
    return PreparedBatch(forward, sampled)


def _rows(ordered: Sequence[ScheduledItem]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens: list[int] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    for item in ordered:
        sequence = item.sequence
        start = sequence.num_computed_tokens
        end = start + item.num_tokens
        tokens.extend(sequence.token_ids[start:end])
        place = np.arange(start, end, dtype=np.int64)
        first_block = start // BLOCK_SIZE
        table = np.array(sequence.block_table[first_block : -(-end // BLOCK_SIZE)], dtype=np.int64)
        positions.append(place)
        slots.append(table[place // BLOCK_SIZE - first_block] * BLOCK_SIZE + place % BLOCK_SIZE)
    empty = np.zeros(0, dtype=np.int64)
    return (
        np.array(tokens, dtype=np.int64),
        np.concatenate(positions) if positions else empty,
        np.concatenate(slots) if slots else empty,
    )


def _window_plan(
    singles: Sequence[ScheduledItem],
    chunks: Sequence[ScheduledItem],
    chunk_starts: Sequence[int],
    cache: PagedKVCache,
    window: KeyWindow | None,
) -> WindowPlan:
    tables = [item.sequence.block_table for item in singles]
    num_keys = [item.sequence.num_computed_tokens + 1 for item in singles]
    return WindowPlan(
        decode_groups(tables, num_keys, cache.bytes_per_key(window), window),
        [
            prefill_segment(
                start, item.num_tokens, item.sequence.num_computed_tokens, item.sequence.block_table, window
            )
            for item, start in zip(chunks, chunk_starts, strict=True)
        ],
    )
