"""Which experts a token goes to, and with what weights.

Legend: T tokens, E experts, K experts per token, G expert groups, D hidden. Scores are always fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

ScoringFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
RoutingFunction = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class Router(Protocol):
    """Selects experts."""

    @property
    def top_k(self) -> int:
        """K, the experts per token."""

    def select(self, hidden_TD: torch.Tensor, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (topk_weights_TK fp32, topk_ids_TK int64); ids are logical experts."""


def scores_of(logits_TE: torch.Tensor, scoring: ScoringFunction) -> torch.Tensor:
    """fp32 scores of router logits, whose bits do not depend on the number of rows."""
    logits_TE = logits_TE.float()
    if scoring == "softmax":
        return torch.softmax(logits_TE, dim=-1)
    # Rows that are apart in memory are cut into vectors one by one, each in the same way.
    scores_TE = logits_TE.new_empty((logits_TE.shape[0], logits_TE.shape[1] + 1))[:, :-1].copy_(logits_TE)
    if scoring == "sigmoid":
        return scores_TE.sigmoid_()
    return F.softplus(scores_TE).sqrt_()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKRouter:
    """Top-k by score, optionally within the best groups of experts.

    `bias_E` steers the selection only: weights gather the unbiased scores (DeepSeek-V3, auxiliary-loss-free
    balancing). A group's score is the sum of its two best biased scores with a bias, its best score without
    (DeepSeek-V3 and V2 reference code). Renormalisation comes before any scaling factor, which the runner applies.
    """

    num_experts: int
    top_k: int
    renormalize: bool
    scoring: ScoringFunction = "softmax"
    num_expert_groups: int = 1
    topk_groups: int = 1
    bias_E: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, must be from 1 to {self.num_experts}")
        if self.num_experts % self.num_expert_groups:
            raise ValueError(
                f"num_expert_groups is {self.num_expert_groups}, must divide num_experts ({self.num_experts})"
            )
        if not 1 <= self.topk_groups <= self.num_expert_groups:
            raise ValueError(f"topk_groups is {self.topk_groups}, must be from 1 to {self.num_expert_groups}")
        if self.top_k > self.topk_groups * (self.num_experts // self.num_expert_groups):
            raise ValueError(f"top_k is {self.top_k}, more than the experts of {self.topk_groups} groups")

    def select(self, hidden_TD: torch.Tensor, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        scores_TE = scores_of(logits_TE, self.scoring)
        choice_TE = scores_TE if self.bias_E is None else scores_TE + self.bias_E
        if self.num_expert_groups > 1:
            choice_TE = self._mask_to_best_groups(choice_TE)
        if self.bias_E is None and self.num_expert_groups == 1:
            weights_TK, ids_TK = torch.topk(choice_TE, self.top_k, dim=-1)
        else:
            ids_TK = torch.topk(choice_TE, self.top_k, dim=-1).indices
            weights_TK = scores_TE.gather(1, ids_TK)
        if self.renormalize:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_TK, ids_TK

    def _mask_to_best_groups(self, choice_TE: torch.Tensor) -> torch.Tensor:
        group_size = self.num_experts // self.num_expert_groups
        grouped_TGe = choice_TE.view(choice_TE.shape[0], self.num_expert_groups, group_size)
        if self.bias_E is None:
            group_scores_TG = grouped_TGe.amax(dim=-1)
        else:
            group_scores_TG = grouped_TGe.topk(min(2, grouped_TGe.shape[-1]), dim=-1).values.sum(dim=-1)
        best = torch.topk(group_scores_TG, self.topk_groups, dim=-1).indices
        keep_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(1, best, True)
        return grouped_TGe.masked_fill(~keep_TG.unsqueeze(-1), float("-inf")).view_as(choice_TE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomRouter:
    """Routing by a function `(hidden_TD, logits_TE, top_k) -> (topk_weights_TK, topk_ids_TK)`."""

    top_k: int
    function: RoutingFunction

    def select(self, hidden_TD: torch.Tensor, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights_TK, ids_TK = self.function(hidden_TD, logits_TE, self.top_k)
        return weights_TK.float(), ids_TK.long()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassthroughRouter:
    """Takes a choice that was made elsewhere: the logits that it gets are that choice, put together by `pack`."""

    top_k: int

    @staticmethod
    def pack(weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Weights and ids side by side, fp32, which holds every whole number up to 2^24; [T, 2K]."""
        return torch.cat([weights_TK.float(), ids_TK.float()], dim=-1)

    def select(self, hidden_TD: torch.Tensor, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        if logits_TE.shape[1] != 2 * self.top_k:
            raise ValueError(f"a choice has {logits_TE.shape[1]} numbers a token, must have {2 * self.top_k}")
        weights_TK, ids_TK = logits_TE.chunk(2, dim=-1)
        return weights_TK, ids_TK.long()
