"""What a rank does in a process of its own. Raises if anything is wrong, so the exit code tells."""

import multiprocessing
from multiprocessing.queues import SimpleQueue

import torch

from moeray.comm.buffers import MoELayerSpec
from moeray.comm.group import CommGroup, host_store, join_store
from tests.support.expert_ranks import (
    CPU,
    HOST,
    JOIN_S,
    expected_outputs,
    make_batch,
    make_exchange,
    make_topology,
    run_layer,
)


def check_one_rank(
    rank: int, size: int, ports: "SimpleQueue[int]", results: "SimpleQueue[int]", device_type: str = "cpu"
) -> None:
    """Join the group and compare this rank's outputs with the reference, for every dispatcher and mode."""
    torch.set_num_threads(1)
    device = CPU if device_type == "cpu" else torch.device(device_type, rank)
    store = None
    if rank == 0:
        store, port = host_store(HOST, 30.0)
        for _ in range(size - 1):
            ports.put(port)
    else:
        port = ports.get()
    group = CommGroup.build(
        epoch=1,
        rank=rank,
        slots=range(size),
        store=store or join_store(HOST, port, 30.0),
        device=device,
        timeout_s=20.0,
        warm_timeout_s=30.0,
    )
    topology = make_topology(range(size), 8)
    tokens = [5 * (index + 1) for index in range(size)]
    batches = [
        make_batch(n, hidden=64, top_k=4, num_experts=8, seed=n, skewed=False, dtype=torch.float32) for n in tokens
    ]
    expected_TD = expected_outputs(batches)[rank]
    spec = MoELayerSpec(layer=0, hidden_size=64, top_k=4, num_experts=8, dtype=torch.float32)
    for combine in ("exact", "fast"):
        for dispatcher in ("all_gather", "all_to_all"):
            exchange = make_exchange([spec], combine=combine, dispatcher=dispatcher, device=device)
            exchange.install(topology, group, rank)
            exchange.begin_step(tokens)
            out_TD = run_layer(exchange, topology, rank, batches[rank].to(device)).cpu()
            if combine == "exact" and device == CPU:
                assert torch.equal(out_TD, expected_TD)
            else:
                torch.testing.assert_close(out_TD, expected_TD, rtol=1e-5, atol=1e-5)
    group.exchange_header(torch.zeros(1, dtype=torch.int64))
    results.put(rank)
    group.close()


def run_processes(size: int, device_type: str) -> None:
    """Start all ranks and wait. Raises `AssertionError` if one of them failed or did not end."""
    context = multiprocessing.get_context("spawn")
    ports, results = context.SimpleQueue(), context.SimpleQueue()
    ranks = [
        context.Process(target=check_one_rank, args=(rank, size, ports, results, device_type), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(JOIN_S)
    try:
        assert [process.exitcode for process in ranks] == [0] * size
        assert sorted(results.get() for _ in ranks) == list(range(size))
    finally:
        for process in ranks:
            process.kill()
            process.join(JOIN_S)
            process.close()
        results.close()
        ports.close()
