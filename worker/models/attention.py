"""Attention over a paged KV cache, with bits that do not depend on the batch (see `attention_plan.py`).

Legend: T tokens of the step, B sequences of a decode group, N keys with padding, H KV heads, G query heads per KV head,
d key dimension, e value dimension.
"""

import torch
import torch.nn.functional as F

from moeray.worker.models.attention_plan import ROW_MULTIPLE, AttentionPlan, DecodeGroup, PrefillSegment
from moeray.worker.models.paged_cache import PagedKVCache


def paged_attention(
    layer: int,
    query_THGd: torch.Tensor,
    cache: PagedKVCache,
    plan: AttentionPlan,
    scale: float,
    sinks_HG: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [T, H, G, e]; the step's own keys and values must have been written.

    Where the cache keeps no values, e is d: the values are a slice of the keys, and the caller takes it of the output.
    A head's sink is the logit of a key that takes part in the softmax and has no value (gpt-oss).
    """
    shape = cache.shapes[layer]
    step = plan[shape.window]
    out_THGe = query_THGd.new_empty((*query_THGd.shape[:3], shape.value_dim or shape.key_dim))
    for group in step.decode_groups:
        out_THGe[group.start : group.end] = _decode(layer, query_THGd, cache, group, scale, sinks_HG)
    for segment in step.prefills:
        out_THGe[segment.start : segment.end] = _prefill(layer, query_THGd, cache, segment, scale, sinks_HG)
    return out_THGe


def _decode(
    layer: int,
    query_THGd: torch.Tensor,
    cache: PagedKVCache,
    group: DecodeGroup,
    scale: float,
    sinks_HG: torch.Tensor | None,
) -> torch.Tensor:
    query_BHGd = query_THGd[group.start : group.end]
    num_seqs, num_kv_heads, num_groups, key_dim = query_BHGd.shape
    padded = -(-num_groups // ROW_MULTIPLE) * ROW_MULTIPLE
    if padded != num_groups:
        rows = query_BHGd.new_zeros((num_seqs, num_kv_heads, padded, key_dim))
        rows[:, :, :num_groups] = query_BHGd
        query_BHGd = rows
    keys, values = cache.gather(layer, group.blocks)
    keys_BHNd = keys.view(num_kv_heads, num_seqs, -1, key_dim).transpose(0, 1)
    values_BHNe = values.view(num_kv_heads, num_seqs, -1, values.shape[-1]).transpose(0, 1)
    if sinks_HG is None:
        out_BHGe = F.scaled_dot_product_attention(query_BHGd, keys_BHNd, values_BHNe, attn_mask=group.mask, scale=scale)
        return out_BHGe[:, :, :num_groups]
    sinks_1HG = F.pad(sinks_HG, (0, padded - num_groups)).unsqueeze(0)
    return _with_sinks(query_BHGd, keys_BHNd, values_BHNe, group.mask, scale, sinks_1HG)[:, :, :num_groups]


def _prefill(
    layer: int,
    query_THGd: torch.Tensor,
    cache: PagedKVCache,
    segment: PrefillSegment,
    scale: float,
    sinks_HG: torch.Tensor | None,
) -> torch.Tensor:
    chunk_THGd = query_THGd[segment.start : segment.end]
    num_tokens, num_kv_heads, num_groups, key_dim = chunk_THGd.shape
    rows_HGTd = chunk_THGd.new_zeros((num_kv_heads, num_groups, segment.mask.shape[2], key_dim))
    rows_HGTd[:, :, :num_tokens] = chunk_THGd.permute(1, 2, 0, 3)
    keys, values = cache.gather(layer, segment.blocks)
    keys_HGNd = keys.unsqueeze(1).expand(num_kv_heads, num_groups, *keys.shape[1:])
    values_HGNe = values.unsqueeze(1).expand(num_kv_heads, num_groups, *values.shape[1:])
    if sinks_HG is None:
        out_HGTe = F.scaled_dot_product_attention(
            rows_HGTd, keys_HGNd, values_HGNe, attn_mask=segment.mask, scale=scale
        )
    else:
        out_HGTe = _with_sinks(rows_HGTd, keys_HGNd, values_HGNe, segment.mask, scale, sinks_HG.unsqueeze(-1))
    return out_HGTe[:, :, :num_tokens].permute(2, 0, 1, 3)


def _with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention whose weights sum to 1 only together with the sink's: the output times Z / (Z + exp(sink)).

    Z is the sum of the exponentials; `sinks` broadcast over the query's first three dims. The factor is made in fp64,
    whose rounding hides that vectors and their tails have different exponential functions.
    """
    if query.device.type == "cpu":
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_z = attend(query, keys, values, attn_mask=mask, scale=scale)
    else:
        logits = torch.matmul(query, keys.transpose(-1, -2)).float() * scale + mask
        log_z = logits.logsumexp(-1)
        out = torch.matmul((logits - log_z.unsqueeze(-1)).exp().to(values.dtype), values)
    factor = torch.sigmoid(log_z.double() - sinks.double()).unsqueeze(-1).to(out.dtype)
    return out * factor  # type: ignore[no-any-return]
