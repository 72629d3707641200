"""A choice that was made elsewhere goes through the router as it is."""

import pytest
import torch

from moeray.worker.moe.router import PassthroughRouter


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_weights_and_ids_come_back(num_tokens: int) -> None:
    weights_TK = torch.rand(num_tokens, 3)
    ids_TK = torch.randint(0, 1 << 24, (num_tokens, 3))
    choice = PassthroughRouter.pack(weights_TK.double(), ids_TK)
    found_weights, found_ids = PassthroughRouter(top_k=3).select(torch.zeros(num_tokens, 8), choice)
    assert torch.equal(found_weights, weights_TK)
    assert torch.equal(found_ids, ids_TK)
    assert (found_weights.dtype, found_ids.dtype) == (torch.float32, torch.int64)


def test_another_number_of_experts_is_refused() -> None:
    choice = PassthroughRouter.pack(torch.rand(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="a choice has 6 numbers a token, must have 4"):
        PassthroughRouter(top_k=2).select(torch.zeros(2, 8), choice)
