"""Several ranks of one group in this process, a thread each, with a toy expert whose results are exact.

Legend: T tokens, K experts per token, D hidden, E experts, P pairs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from moeray.comm.buffers import BufferCapacity, CommunicationBuffers, MoELayerSpec
from moeray.comm.exchange import ExpertExchange
from moeray.comm.group import CommGroup, host_store, join_store
from moeray.comm.placement import ExpertPlacement
from moeray.comm.reference import reference_moe
from moeray.comm.topology import Member, Topology

T = TypeVar("T")
CPU = torch.device("cpu")
HOST = "127.0.0.1"
JOIN_S = 60.0


def run_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    """Run `work(rank)` in a thread each; results in rank order. The first rank's error is raised."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
        return [future.result(JOIN_S) for future in futures]


def build_groups(
    slots: Sequence[int], epoch: int = 1, timeout_s: float = 20.0, warm_timeout_s: float = 20.0
) -> list[CommGroup]:
    """The groups of all ranks, in rank order."""
    store, port = host_store(HOST, 20.0)

    def build(rank: int) -> CommGroup:
        return CommGroup.build(
            epoch=epoch,
            rank=rank,
            slots=slots,
            store=join_store(HOST, port, 20.0),
            device=CPU,
            timeout_s=timeout_s,
            warm_timeout_s=warm_timeout_s,
        )

    groups = run_ranks(len(slots), build)
    del store
    return groups


def make_topology(
    slots: Sequence[int],
    num_experts: int,
    *,
    epoch: int = 1,
    num_seats: int | None = None,
    num_layers: int = 1,
) -> Topology:
    """Contiguous experts on these slots."""
    placement = ExpertPlacement.contiguous(
        num_layers=num_layers,
        num_experts=num_experts,
        slots=slots,
        num_seats=num_seats or -(-num_experts // len(slots)),
    )
    members = tuple(Member(slot=slot, incarnation=0, node="n", endpoint="", public_key="") for slot in slots)
    return Topology(epoch=epoch, members=members, placement=placement)


@dataclass(frozen=True)
class Batch:
    """One rank's input; `topk_ids_TK` are logical."""

    hidden_TD: torch.Tensor
    topk_ids_TK: torch.Tensor
    topk_weights_TK: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.hidden_TD.shape[0]

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return Batch(self.hidden_TD.to(device), self.topk_ids_TK.to(device), self.topk_weights_TK.to(device))


def make_batch(
    num_tokens: int, *, hidden: int, top_k: int, num_experts: int, seed: int, skewed: bool, dtype: torch.dtype
) -> Batch:
    """Random rows; `skewed` sends all of them to the same experts."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    if skewed and num_tokens:
        logits[:] = logits[0].clone()
    weights, ids = logits.softmax(-1).topk(top_k)
    return Batch(torch.randn(num_tokens, hidden, generator=generator).to(dtype), ids, weights)


def toy_expert(logical: torch.Tensor, rows_PD: torch.Tensor) -> torch.Tensor:
    """expert e: row * (1 + e / 7) - e / 5, elementwise, so that a row's bits do not depend on its neighbours."""
    scale = (1.0 + logical / 7.0).unsqueeze(-1).to(rows_PD.dtype)
    return rows_PD * scale - (logical / 5.0).unsqueeze(-1).to(rows_PD.dtype)


def expected_outputs(batches: Sequence[Batch]) -> list[torch.Tensor]:
    """What the reference says."""
    return reference_moe(
        [batch.hidden_TD for batch in batches],
        [batch.topk_ids_TK for batch in batches],
        [batch.topk_weights_TK for batch in batches],
        lambda expert, row_D: toy_expert(torch.tensor([expert]), row_D.unsqueeze(0))[0],
    )


def make_exchange(
    specs: Sequence[MoELayerSpec],
    *,
    combine: str,
    dispatcher: str,
    max_workers: int = 4,
    max_tokens: int = 64,
    piece_tokens: int = 64,
    device: torch.device = CPU,
) -> ExpertExchange:
    """An exchange with buffers attached, no epoch installed."""
    capacity = BufferCapacity(max_workers=max_workers, max_tokens=max_tokens)
    exchange = ExpertExchange(combine=combine, dispatcher=dispatcher, device=device)
    exchange.attach_buffers(CommunicationBuffers(specs, capacity, piece_tokens, device))
    return exchange


def run_layer(exchange: ExpertExchange, topology: Topology, slot: int, batch: Batch, layer: int = 0) -> torch.Tensor:
    """One MoE layer of this rank, with the toy expert. `begin_step` came before."""
    logical_S = torch.tensor(topology.placement.seats_of(layer, slot), device=batch.hidden_TD.device)
    out_TD = torch.empty_like(batch.hidden_TD)
    for piece in exchange.pieces(batch.num_tokens):
        ids_TK = exchange.physical_ids(layer, batch.topk_ids_TK[piece])
        rows = exchange.dispatch(batch.hidden_TD[piece], ids_TK, batch.topk_weights_TK[piece])
        here_RK = rows.seat_ids_RK >= 0
        logical_P = logical_S[rows.seat_ids_RK[here_RK]]
        assert bool((logical_P >= 0).all()), "a row was sent to an empty seat"
        expert_rows_PD = toy_expert(logical_P, rows.hidden_RD[here_RK.nonzero()[:, 0]])
        out_TD[piece] = exchange.combine(expert_rows_PD, rows.handle)
    return out_TD


def run_step(
    exchanges: Sequence[ExpertExchange], topology: Topology, batches: Sequence[Batch], num_layers: int = 1
) -> list[torch.Tensor]:
    """One step of all ranks: the last layer's outputs."""
    counts = [batch.num_tokens for batch in batches]

    def work(rank: int) -> torch.Tensor:
        exchanges[rank].begin_step(counts)
        for layer in range(num_layers):
            out_TD = run_layer(exchanges[rank], topology, topology.slots[rank], batches[rank], layer)
        return out_TD

    return run_ranks(len(exchanges), work)
