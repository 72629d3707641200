"""The one place where experts' rows are added, so that every dispatcher gives the same bits.

Exact mode multiplies first and adds afterwards, k by k in ascending order, in fp32. Only separate elementwise mul and
add are used: they round the same wherever a value lies in memory, while fused, reduced or blocked sums do not.

Legend: T tokens, K experts per token, D hidden, P pairs (token, k).
"""

import torch


def weighted_sum(
    rows_PD: torch.Tensor,
    positions_KT: torch.Tensor | None,
    weights_TK: torch.Tensor,
    gathered: torch.Tensor,
    products: torch.Tensor,
) -> torch.Tensor:
    """sum over k of weights[t, k] * row(t, k), hidden_TD in the dtype of the rows.

    `positions_KT` (int64, contiguous) is the row of each pair; None means row t * K + k. `gathered` (dtype of the rows)
    and `products` (fp32) are scratch with room for T * K rows; for fp32 rows they may be the same memory.
    """
    num_tokens, top_k = weights_TK.shape
    hidden = rows_PD.shape[1]
    if num_tokens == 0:
        return rows_PD.new_empty(0, hidden)
    pairs = num_tokens * top_k
    products_KTD = products[:pairs].view(top_k, num_tokens, hidden)
    weights_KT1 = weights_TK.t().unsqueeze(2)
    if positions_KT is None:
        rows_KTD = rows_PD.view(num_tokens, top_k, hidden).transpose(0, 1)
    else:
        rows_KTD = gathered[:pairs]
        torch.index_select(rows_PD, 0, positions_KT.view(-1), out=rows_KTD)
        rows_KTD = rows_KTD.view(top_k, num_tokens, hidden)
    torch.mul(rows_KTD, weights_KT1, out=products_KTD)
    return add_in_order(products_KTD).to(rows_PD.dtype)


def add_in_order(products_KTD: torch.Tensor) -> torch.Tensor:
    """((p0 + p1) + p2) + ..., as a new tensor: the caller keeps it, while buffers are used again."""
    first, *others = products_KTD.unbind(0)
    if not others:
        return first.clone()
    total_TD = torch.add(first, others[0])
    for product_TD in others[1:]:
        total_TD.add_(product_TD)
    return total_TD
