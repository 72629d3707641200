"""Rows over NCCL: the same dispatchers on another device and backend."""

import pytest
import torch

from moeray.comm.buffers import MoELayerSpec
from moeray.comm.group import CommGroup
from tests.support.expert_ranks import expected_outputs, make_batch, make_exchange, make_topology, run_layer
from tests.support.spawned_ranks import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device for each rank")
def test_dispatchers_over_nccl_equal_the_reference() -> None:
    run_processes(min(torch.cuda.device_count(), 4), "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loopback_on_the_device_equals_the_reference(dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    group = CommGroup.build(epoch=1, rank=0, slots=[0], store=None, device=device, timeout_s=10.0, warm_timeout_s=10.0)
    topology = make_topology([0], 8)
    spec = MoELayerSpec(layer=0, hidden_size=64, top_k=4, num_experts=8, dtype=dtype)
    exchange = make_exchange([spec], combine="exact", dispatcher="auto", device=device, piece_tokens=16)
    exchange.install(topology, group, 0)
    batch = make_batch(40, hidden=64, top_k=4, num_experts=8, seed=1, skewed=False, dtype=dtype)
    exchange.begin_step([40])
    out_TD = run_layer(exchange, topology, 0, batch.to(device)).cpu()
    torch.testing.assert_close(out_TD, expected_outputs([batch])[0])
