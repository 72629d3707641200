"""How long dispatch + combine take per MoE layer, for each dispatcher, in real processes on this machine.

    python benchmarks/dispatch.py --workers 2 4 --tokens 1 8 32 256

Experts are left out: each row comes back as it went. Times are the median over the rounds of the slowest rank, with
their ratio to the loopback dispatcher with as many tokens. Run it on a quiet machine.

Legend: T tokens of each rank, K experts per token, D hidden.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue

import torch

from moeray.comm.buffers import BufferCapacity, CommunicationBuffers, MoELayerSpec
from moeray.comm.exchange import ExpertExchange
from moeray.comm.group import CommGroup, host_store, join_store
from moeray.comm.placement import ExpertPlacement
from moeray.comm.topology import Member, Topology

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
MOVING = (("all_to_all", "exact"), ("all_gather", "exact"), ("all_to_all", "fast"), ("all_gather", "fast"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured."""

    hidden: int
    top_k: int
    num_experts: int
    tokens: tuple[int, ...]
    rounds: int


Times = dict[tuple[str, str, int], list[float]]


def measure(rank: int, size: int, port: int, sizes: Sizes) -> Times:
    """Seconds of each round on this rank, by dispatcher, combine mode and tokens."""
    torch.set_num_threads(1)
    group = CommGroup.build(
        epoch=1,
        rank=rank,
        slots=range(size),
        store=join_store(HOST, port, TIMEOUT_S) if size > 1 else None,
        device=torch.device("cpu"),
        timeout_s=TIMEOUT_S,
        warm_timeout_s=TIMEOUT_S,
    )
    times: Times = {}
    with torch.inference_mode():
        for dispatcher, combine in MOVING if size > 1 else (("loopback", "exact"),):
            for num_tokens in sizes.tokens:
                times[dispatcher, combine, num_tokens] = _rounds(group, dispatcher, combine, num_tokens, sizes)
    group.exchange_header(torch.zeros(1, dtype=torch.int64))
    group.close()
    return times


def _rounds(group: CommGroup, dispatcher: str, combine: str, num_tokens: int, sizes: Sizes) -> list[float]:

    device = torch.device("cpu")
    spec = MoELayerSpec(
        layer=0,
        hidden_size=sizes.hidden,
        top_k=sizes.top_k,
        num_experts=sizes.num_experts,
        dtype=torch.float32,
    )
    capacity = BufferCapacity(max_workers=group.size, max_tokens=max(sizes.tokens))
    exchange = ExpertExchange(combine=combine, dispatcher=dispatcher, device=device)
    exchange.attach_buffers(CommunicationBuffers([spec], capacity, max(sizes.tokens), device))
    placement = ExpertPlacement.contiguous(
        num_layers=1,
        num_experts=sizes.num_experts,
        slots=group.slots,
        num_seats=-(-sizes.num_experts // group.size),
    )
    members = tuple(Member(slot=s, incarnation=0, node="", endpoint="", public_key="") for s in group.slots)
    exchange.install(Topology(epoch=1, members=members, placement=placement), group, group.rank)
    generator = torch.Generator().manual_seed(group.rank)
    hidden_TD = torch.randn(num_tokens, sizes.hidden, generator=generator)
    logits_TE = torch.randn(num_tokens, sizes.num_experts, generator=generator)
    weights_TK, ids_TK = logits_TE.softmax(-1).topk(sizes.top_k)
    exchange.begin_step([num_tokens] * group.size)
    seconds = []
    for _ in range(sizes.rounds + 3):
        group.exchange_header(torch.zeros(1, dtype=torch.int64))
        started = time.perf_counter()
        rows = exchange.dispatch(hidden_TD, exchange.physical_ids(0, ids_TK), weights_TK)
        dispatched = time.perf_counter()
        # The experts' part, not counted.
        expert_rows_PD = rows.hidden_RD.index_select(0, (rows.seat_ids_RK >= 0).nonzero()[:, 0])
        returned = time.perf_counter()
        exchange.combine(expert_rows_PD, rows.handle)
        seconds.append(dispatched - started + time.perf_counter() - returned)
    return seconds[3:]


def run_rank(rank: int, size: int, port: int, sizes: Sizes, results: "SimpleQueue[Times]") -> None:
    """A rank in a process of its own."""
    results.put(measure(rank, size, port, sizes))


def measure_group(size: int, sizes: Sizes) -> list[Times]:
    """The times of all ranks. Raises `SystemExit` if one of them fails."""
    store, port = host_store(HOST, TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    results: SimpleQueue[Times] = context.SimpleQueue()
    ranks = [context.Process(target=run_rank, args=(rank, size, port, sizes, results)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"exit codes of the ranks: {[process.exitcode for process in ranks]}")
    del store
    return [results.get() for _ in ranks]


def table(size: int, ranks: Sequence[Times], loopback: Times) -> str:
    """One line for each dispatcher and mode: microseconds and ratio to loopback, by tokens."""
    lines = []
    for dispatcher, combine in MOVING:
        cells = []
        for key, own in loopback.items():
            slowest = [
                max(rounds) for rounds in zip(*(times[dispatcher, combine, key[2]] for times in ranks), strict=True)
            ]
            median, base = statistics.median(slowest), statistics.median(own)
            cells.append(f"{median * 1e6:7.0f} us ({median / base:5.1f} x)")
        lines.append(f"{size} workers  {dispatcher:<10} {combine:<5} " + "  ".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sizes = Sizes(
        hidden=given.hidden,
        top_k=given.top_k,
        num_experts=given.experts,
        tokens=tuple(given.tokens),
        rounds=given.rounds,
    )
    loopback = measure(0, 1, 0, sizes)
    cells = "  ".join(f"{statistics.median(own) * 1e6:7.0f} us          " for own in loopback.values())
    sys.stdout.write(f"D={sizes.hidden} K={sizes.top_k} E={sizes.num_experts}, tokens of each rank: {sizes.tokens}\n")
    sys.stdout.write(f"1 worker   loopback   exact {cells}\n")
    for size in given.workers:
        sys.stdout.write(table(size, measure_group(size, sizes), loopback) + "\n")


if __name__ == "__main__":
    main()
