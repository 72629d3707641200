"""What latent attention adds to exact mode: products with a weight for each head, and wide keys that are values too."""

import pytest
import torch

from moeray.worker.config import BLOCK_SIZE
from moeray.worker.models.attention import paged_attention
from moeray.worker.models.attention_plan import WindowPlan, decode_groups, prefill_segment
from moeray.worker.models.linear import RowLinear
from moeray.worker.models.paged_cache import CacheShape, PagedKVCache

COUNTS = (1, 2, 3, 4, 5, 7, 13, 31, 64, 65, 100, 129, 300)


@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(4, 16, 32), (2, 200, 40), (3, 512, 128)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_rows_keep_their_bits_whatever_their_number(heads: int, inputs: int, outputs: int, is_transposed: bool) -> None:
    torch.manual_seed(0)
    linear = RowLinear(True)
    x = torch.randn(400, heads, inputs)
    weight = torch.randn(heads, outputs, inputs + 8)[..., 8:].transpose(1, 2)
    if not is_transposed:
        weight = weight.contiguous()
    whole = linear.per_head(x, weight)
    assert torch.allclose(whole, torch.einsum("mhi,hio->mho", x, weight), atol=1e-3)
    for count in COUNTS:
        assert torch.equal(linear.per_head(x[400 - count :], weight), whole[400 - count :]), count
    assert linear.per_head(x[:0], weight).shape == (0, heads, outputs)


@pytest.mark.parametrize(("num_heads", "key_dim"), [(3, 40), (4, 208), (4, 576)])
def test_decode_has_the_bits_of_prefill(num_heads: int, key_dim: int) -> None:
    torch.manual_seed(0)
    shape = CacheShape(num_kv_heads=1, key_dim=key_dim, value_dim=0)
    cache = PagedKVCache([shape], num_blocks=40, dtype=torch.float32, device=torch.device("cpu"))
    length, table = 550, list(range(39, 0, -1))
    keys, query = torch.randn(length, 1, key_dim), torch.randn(length, 1, num_heads, key_dim)
    slots = torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)])
    cache.write(0, keys, None, slots)

    def attend(rows: torch.Tensor, plan: WindowPlan) -> torch.Tensor:
        return paged_attention(0, rows, cache, {None: plan}, 0.05)

    whole = attend(query, WindowPlan([], [prefill_segment(0, length, 0, table)]))
    logits = torch.einsum("hd,nd->hn", query[-1, 0], keys[:, 0]) * 0.05
    assert torch.allclose(whole[-1, 0], torch.softmax(logits, -1) @ keys[:, 0], atol=1e-5)
    chunk = attend(query[101:230], WindowPlan([], [prefill_segment(0, 129, 101, table)]))
    assert torch.equal(chunk, whole[101:230])
    positions = [3, 191, 193, 255, 384, 549]
    groups = decode_groups([table] * 6, [p + 1 for p in positions], cache.bytes_per_key(None), None)
    assert torch.equal(attend(query[positions], WindowPlan(groups, [])), whole[positions])
