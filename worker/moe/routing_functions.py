"""Ways of routing that are no top-k of scores, for `CustomRouter`.

Legend: T tokens, D hidden, E experts, K experts per token.
"""

from functools import partial

import torch

from moeray.worker.moe.router import RoutingFunction


def sparsemixer(
    hidden_TD: torch.Tensor,  # noqa: ARG001
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    jitter: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SparseMixer's inference (Liu et al. 2024, as Phi-3.5-MoE uses it): the best expert, then the best of the rest.

    An expert's weight is its share of a softmax over those whose logits come near it: relatively, within twice the
    jitter. Weights do not sum to 1.
    """
    logits_TE = logits_TE.float()
    remaining_TE = logits_TE
    weights, ids = [], []
    for _ in range(top_k):
        best_T1, best_id_T1 = remaining_TE.max(dim=-1, keepdim=True)
        scale_TE = logits_TE.abs().clamp(min=best_T1)
        is_far_TE = (best_T1 - logits_TE) / scale_TE > 2 * jitter
        shares_TE = torch.softmax(remaining_TE.masked_fill(is_far_TE, float("-inf")), dim=-1)
        weights.append(shares_TE.gather(-1, best_id_T1))
        ids.append(best_id_T1)
        remaining_TE = remaining_TE.scatter(-1, best_id_T1, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(ids, dim=-1)


def routing_function(name: str, jitter: float) -> RoutingFunction:
    """The function of this name; `ValueError` naming those there are."""
    functions: dict[str, RoutingFunction] = {"sparsemixer": partial(sparsemixer, jitter=jitter)}
    if name not in functions:
        raise ValueError(f"routing is {name!r}, must be one of {', '.join(functions)}")
    return functions[name]
