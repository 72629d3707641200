"""Routers: which experts a token goes to, and with what weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moeray.worker.moe.router import CustomRouter, Router, TopKRouter
from moeray.worker.moe.routing_functions import routing_function

EXPERTS, TOP_K, HIDDEN = 6, 2, 32


def test_softmax_top_k_renormalised() -> None:
    logits = torch.randn(5, EXPERTS)
    router = TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=True)
    weights, ids = router.select(torch.zeros(5, HIDDEN), logits)
    values, best = torch.softmax(logits, -1).topk(TOP_K)
    assert torch.equal(ids, best)
    assert torch.allclose(weights, values / values.sum(-1, keepdim=True))
    plain, _ = TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=False).select(torch.zeros(5, 1), logits)
    assert torch.equal(plain, values)


@pytest.mark.parametrize(
    ("scoring", "function"),
    [
        ("sigmoid", torch.sigmoid),
        ("sqrtsoftplus", lambda x: F.softplus(x).sqrt()),
        ("softmax", lambda x: torch.softmax(x, -1)),
    ],
)
def test_scores_are_fp32(scoring: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    logits = torch.randn(4, EXPERTS).bfloat16()
    router = TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=False, scoring=scoring)
    weights, _ = router.select(torch.zeros(4, 1), logits)
    assert weights.dtype == torch.float32
    assert torch.allclose(weights, function(logits.float()).topk(TOP_K).values)


def test_bias_steers_the_choice_and_weights_stay_unbiased() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0, -3.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 5.0])
    router = TopKRouter(num_experts=EXPERTS, top_k=2, renormalize=False, scoring="sigmoid", bias_E=bias)
    weights, ids = router.select(torch.zeros(1, 1), logits)
    assert ids.tolist() == [[5, 0]]
    assert torch.allclose(weights, torch.sigmoid(torch.tensor([[-3.0, 2.0]])))


def test_group_score_is_the_maximum_without_bias_and_the_best_two_with() -> None:
    # Group 0 has the best single expert, group 1 the best pair, of 3 experts each.
    logits = torch.tensor([[3.0, -9.0, -9.0, 2.0, 2.0, -9.0]])
    common: dict[str, Any] = {
        "num_experts": 6,
        "top_k": 2,
        "renormalize": False,
        "scoring": "sigmoid",
        "num_expert_groups": 2,
        "topk_groups": 1,
    }
    _, by_maximum = TopKRouter(**common).select(torch.zeros(1, 1), logits)
    assert by_maximum[0, 0].item() == 0
    assert set(by_maximum[0].tolist()) <= {0, 1, 2}
    _, by_pair = TopKRouter(**common, bias_E=torch.zeros(6)).select(torch.zeros(1, 1), logits)
    assert set(by_pair[0].tolist()) == {3, 4}


def test_a_single_group_is_plain_top_k() -> None:
    logits = torch.randn(20, 8)
    plain = TopKRouter(num_experts=8, top_k=3, renormalize=True)
    grouped = TopKRouter(num_experts=8, top_k=3, renormalize=True, num_expert_groups=4, topk_groups=4)
    for ours, theirs in zip(plain.select(logits, logits), grouped.select(logits, logits), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"top_k": 7}, "top_k"),
        ({"num_expert_groups": 4}, "num_expert_groups"),
        ({"num_expert_groups": 3, "topk_groups": 4}, "topk_groups"),
        ({"num_expert_groups": 6, "topk_groups": 1}, "top_k"),
    ],
)
def test_impossible_routers_are_refused_by_field(fields: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TopKRouter(**{"num_experts": 6, "top_k": 2, "renormalize": True, **fields})  # type: ignore[arg-type]


ROUTERS: dict[str, Router] = {
    "plain": TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=True),
    "sigmoid": TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=True, scoring="sigmoid"),
    "grouped": TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=False, num_expert_groups=3, topk_groups=2),
    "grouped-biased": TopKRouter(
        num_experts=EXPERTS,
        top_k=TOP_K,
        renormalize=True,
        scoring="sigmoid",
        num_expert_groups=3,
        topk_groups=2,
        bias_E=torch.linspace(-0.2, 0.2, EXPERTS),
    ),
    "softplus": TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=True, scoring="sqrtsoftplus"),
    "sparsemixer": CustomRouter(top_k=TOP_K, function=routing_function("sparsemixer", 0.1)),
}


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_a_row_is_routed_alike_in_any_batch_and_none_is_no_error(name: str) -> None:
    router = ROUTERS[name]
    logits = torch.randn(37, EXPERTS, generator=torch.Generator().manual_seed(0))
    weights, ids = router.select(torch.zeros(37, HIDDEN), logits)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    for first, last in ((0, 0), (0, 1), (5, 8), (30, 37)):
        part_weights, part_ids = router.select(torch.zeros(last - first, HIDDEN), logits[first:last])
        assert torch.equal(part_weights, weights[first:last])
        assert torch.equal(part_ids, ids[first:last])


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_sparsemixer_is_that_of_transformers(jitter: float) -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(1)) * 3
    theirs, chosen = sparsemixer(logits, jitter_eps=jitter, training=False)
    weights, ids = routing_function("sparsemixer", jitter)(logits, logits, 2)
    assert torch.equal(ids, chosen)
    assert torch.allclose(weights, theirs)


def test_an_unknown_routing_function_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="routing is 'dice', must be one of sparsemixer"):
        routing_function("dice", 0.0)
