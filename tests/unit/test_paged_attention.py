"""Attention over the paged cache against a slow reference: windows, sinks, layers of other shapes, and equal bits."""

import random

import pytest
import torch

from moeray.worker.config import BLOCK_SIZE
from moeray.worker.models.attention import paged_attention
from moeray.worker.models.attention_plan import (
    AttentionPlan,
    WindowPlan,
    decode_groups,
    first_gathered_key,
    prefill_segment,
)
from moeray.worker.models.config import KeyWindow
from moeray.worker.models.paged_cache import CacheShape, PagedKVCache

HEADS, GROUPS, DIM = 2, 3, 16
NUM_BLOCKS = 200
SCALE = 0.3
WINDOWS = [None, KeyWindow(1), KeyWindow(100), KeyWindow(512), KeyWindow(600), KeyWindow(256, is_chunked=True)]


def make_cache(window: KeyWindow | None) -> PagedKVCache:
    shape = CacheShape(num_kv_heads=HEADS, key_dim=DIM, value_dim=DIM, window=window)
    return PagedKVCache([shape], num_blocks=NUM_BLOCKS, dtype=torch.float32, device=torch.device("cpu"))


class Sequence:
    """Random keys, values and queries of one sequence, written to scattered blocks of a cache."""

    def __init__(self, cache: PagedKVCache, length: int, blocks: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.table = blocks
        self.keys, self.values = (torch.randn(length, HEADS, DIM, generator=generator) for _ in range(2))
        self.query = torch.randn(length, HEADS, GROUPS, DIM, generator=generator)
        slots = torch.tensor([blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)])
        cache.write(0, self.keys, self.values, slots)

    def expected(self, position: int, window: KeyWindow | None, sinks: torch.Tensor | None) -> torch.Tensor:
        """One query at a time, in fp64."""
        first = 0 if window is None else window.first_key(position)
        keys, values = (part[first : position + 1].double() for part in (self.keys, self.values))
        logits = torch.einsum("hgd,nhd->hgn", self.query[position].double(), keys) * SCALE
        if sinks is not None:
            logits = torch.cat((logits, sinks.double().unsqueeze(-1)), -1)
        weights = torch.softmax(logits, -1)[..., : len(keys)]
        return torch.einsum("hgn,nhd->hgd", weights, values)


def two_sequences(window: KeyWindow | None) -> tuple[PagedKVCache, list[Sequence]]:
    cache = make_cache(window)
    blocks = random.Random(0).sample(range(1, NUM_BLOCKS), 110)
    return cache, [Sequence(cache, 1300, blocks[:82], 1), Sequence(cache, 400, blocks[82:], 2)]


def attend(
    cache: PagedKVCache, sequences: list[Sequence], spans: list[tuple[int, int, int]], sinks: torch.Tensor | None
) -> list[torch.Tensor]:
    """Rows [first, last) of (sequence, first, last), in one step: single rows decode, others are chunks."""
    window = cache.shapes[0].window
    singles = [span for span in spans if span[2] - span[1] == 1]
    chunks = [span for span in spans if span[2] - span[1] > 1]
    query = torch.cat([sequences[n].query[first:last] for n, first, last in singles + chunks])
    groups = decode_groups(
        [sequences[n].table for n, _, _ in singles],
        [last for _, _, last in singles],
        cache.bytes_per_key(window),
        window,
    )
    segments, start = [], len(singles)
    for n, first, last in chunks:
        segments.append(prefill_segment(start, last - first, first, sequences[n].table, window))
        start += last - first
    plan: AttentionPlan = {window: WindowPlan(groups, segments)}
    out = paged_attention(0, query, cache, plan, SCALE, sinks)
    return list(torch.split(out, [last - first for _, first, last in singles + chunks]))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_is_that_of_the_reference_and_keeps_its_bits(window: KeyWindow | None, has_sinks: bool) -> None:
    cache, sequences = two_sequences(window)
    sinks = torch.linspace(-2, 2, HEADS * GROUPS).view(HEADS, GROUPS) if has_sinks else None
    whole = attend(cache, sequences, [(0, 0, 1300), (1, 0, 400)], sinks)
    for number, position in ((0, 0), (0, 255), (0, 256), (0, 511), (0, 512), (0, 700), (0, 1299), (1, 399)):
        want = sequences[number].expected(position, window, sinks)
        assert torch.allclose(whole[number][position].double(), want, atol=1e-5), position
    for spans in (
        [(0, 0, 700), (1, 100, 333)],
        [(0, 700, 1300), (1, 333, 400)],
        [(0, 600, 601), (1, 399, 400), (0, 1299, 1300), (0, 3, 4)],
        [(0, 1100, 1101)],
        [(1, 77, 78), (0, 509, 700)],
    ):
        for (number, first, last), found in zip(spans, attend(cache, sequences, spans, sinks), strict=True):
            assert torch.equal(found, whole[number][first:last]), (number, first, last)


def test_a_window_gathers_only_what_it_needs() -> None:
    window = KeyWindow(100)
    assert [first_gathered_key(position, window) for position in (5, 610, 611, 1300)] == [0, 0, 512, 1024]
    cache, sequences = two_sequences(window)
    (group,) = decode_groups([sequences[0].table], [1300], cache.bytes_per_key(window), window)
    assert len(group.blocks) * BLOCK_SIZE == 384
    assert group.blocks[0] == sequences[0].table[1024 // BLOCK_SIZE]


def test_blocks_travel_whole_whatever_the_layers_shapes() -> None:
    shapes = [
        CacheShape(num_kv_heads=2, key_dim=8, value_dim=8),
        CacheShape(num_kv_heads=1, key_dim=24, value_dim=0),
        CacheShape(num_kv_heads=3, key_dim=4, value_dim=16, window=KeyWindow(7)),
    ]
    here, there = (
        PagedKVCache(shapes, num_blocks=4, dtype=torch.bfloat16, device=torch.device("cpu")) for _ in range(2)
    )
    slots = torch.arange(2 * BLOCK_SIZE, 3 * BLOCK_SIZE)
    for layer, shape in enumerate(shapes):
        keys, values = (
            torch.randn(BLOCK_SIZE, shape.num_kv_heads, dim).bfloat16() for dim in (shape.key_dim, shape.value_dim)
        )
        here.write(layer, keys, values if shape.value_dim else None, slots)
    payload = here.read_block(2)
    there.write_block(3, payload)
    for layer in range(3):
        for found, wanted in zip(
            there.gather(layer, torch.tensor([3])), here.gather(layer, torch.tensor([2])), strict=True
        ):
            assert torch.equal(found, wanted)
    keys, values = here.gather(1, torch.tensor([2]))
    assert values is keys
    assert here.nbytes == 4 * len(payload)
    with pytest.raises(ValueError, match="a KV block has 3 bytes"):
        there.write_block(1, b"abc")
