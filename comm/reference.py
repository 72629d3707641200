"""The oracle: what dispatch, experts and combine must give together, written to be obviously right and nothing else.

Legend: T tokens, K experts per token, D hidden.
"""

from collections.abc import Callable, Sequence

import torch

Expert = Callable[[int, torch.Tensor], torch.Tensor]


def reference_moe(
    hidden_by_rank: Sequence[torch.Tensor],
    physical_ids_by_rank: Sequence[torch.Tensor],
    topk_weights_by_rank: Sequence[torch.Tensor],
    expert: Expert,
) -> list[torch.Tensor]:
    """Each rank's weighted sums, hidden_TD: token by token, expert by expert, in the order of k, in fp32.

    `expert(physical_expert, row_D)` gives the unweighted output of one expert for one row. Where an expert sits makes
    no difference, so nothing is moved.
    """
    outputs: list[torch.Tensor] = []
    for hidden_TD, ids_TK, weights_TK in zip(hidden_by_rank, physical_ids_by_rank, topk_weights_by_rank, strict=True):
        out_TD = torch.empty_like(hidden_TD)
        for token in range(hidden_TD.shape[0]):
            products = [
                expert(int(ids_TK[token, k]), hidden_TD[token]).to(torch.float32) * weights_TK[token, k]
                for k in range(ids_TK.shape[1])
            ]
            total_D = products[0]
            for product_D in products[1:]:
                total_D = total_D + product_D
            out_TD[token] = total_D.to(hidden_TD.dtype)
        outputs.append(out_TD)
    return outputs
