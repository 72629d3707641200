"""What MoE kernels hold for life: dispatch and combine, whatever the epoch's group and dispatcher.

Kernels are built once, after loading; buffers are attached once, after that; an epoch installs its topology and group
between two steps. Nothing else in the worker has to hear of a change of membership.

Legend: L MoE layers, E logical experts, T tokens, K experts per token, D hidden, P (received row, expert) pairs.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeray.comm import faults
from moeray.comm.all_gather import AllGatherDispatcher
from moeray.comm.all_to_all import AllToAllDispatcher
from moeray.comm.buffers import CommunicationBuffers
from moeray.comm.dispatcher import DispatchedRows, Dispatcher, DispatchHandle, TrafficCounter
from moeray.comm.errors import CapacityError
from moeray.comm.group import CommGroup
from moeray.comm.loopback import LoopbackDispatcher
from moeray.comm.placement import ExpertPlacement
from moeray.comm.seats import SeatMap
from moeray.comm.select import DISPATCHERS, Choice, DispatchSizes, choose_dispatcher
from moeray.comm.topology import Topology

logger = logging.getLogger(__name__)

COMBINE_MODES = ("exact", "fast")


@dataclass(frozen=True, slots=True)
class EpochExchange:
    """What is particular to an epoch: its dispatcher, why it was chosen, and a seat for each expert, [L, E]."""

    epoch: int
    dispatcher: Dispatcher
    choice: Choice
    physical_LE: tuple[torch.Tensor, ...]

    def describe(self, combine_mode: str) -> str:
        """Which dispatcher it is, how it combines, and why it was chosen."""
        return f"dispatcher {self.choice.name}, {combine_mode} combine ({self.choice.reason})"


class ExpertExchange:
    """The current dispatcher behind one stable object. Used by the engine's thread only.

    `num_finished` counts dispatches and combines; any thread may read it.
    """

    def __init__(self, *, combine: str, dispatcher: str, device: torch.device) -> None:
        if combine not in COMBINE_MODES:
            raise ValueError(f"combine is {combine!r}, must be one of {', '.join(COMBINE_MODES)}")
        if dispatcher not in ("auto", *DISPATCHERS):
            raise ValueError(f"dispatcher is {dispatcher!r}, must be one of auto, {', '.join(DISPATCHERS)}")
        self.combine_mode = combine
        self.device = device
        self._requested = dispatcher
        self._buffers: CommunicationBuffers | None = None
        self._serving: EpochExchange | None = None
        self._traffic = TrafficCounter()
        self.num_finished = 0

    def attach_buffers(self, buffers: CommunicationBuffers) -> None:
        """Take the worker's buffers, for life. Raises `ValueError` the second time."""
        if self._buffers is not None:
            raise ValueError("buffers are attached already, they stay for the life of the worker")
        if buffers.device != self.device:
            raise ValueError(f"buffers are on {buffers.device}, must be on {self.device}")
        self._buffers = buffers

    def prepare(self, topology: Topology, group: CommGroup, slot: int) -> "EpochExchange":
        """Make what an epoch needs, beside the one that serves and from any thread; nothing changes yet.

        Raises `ValueError` if topology, group and model do not agree, `CapacityError` if the epoch has more workers
        than the buffers are for, `BackendUnavailable` if the dispatcher that was asked for cannot work.
        """
        buffers = self._check(topology, group, slot)
        sizes = DispatchSizes(
            num_workers=topology.size,
            top_k=max(spec.top_k for spec in buffers.specs),
            hidden_size=max(spec.hidden_size for spec in buffers.specs),
            combine=self.combine_mode,
            backend=group.backend_name,
        )
        choice = choose_dispatcher(self._requested, sizes)
        dispatcher = self._make(choice.name, topology.placement, group, slot, buffers)
        physical_LE = tuple(
            _pick_seats(topology.placement, layer, slot, self.device) for layer in range(topology.placement.num_layers)
        )
        return EpochExchange(topology.epoch, dispatcher, choice, physical_LE)

    def switch(self, prepared: "EpochExchange") -> None:
        """Serve the prepared epoch from now on; the buffers stay the same. Takes no time: between two steps."""
        self._serving = prepared

    def install(self, topology: Topology, group: CommGroup, slot: int) -> None:
        """`prepare`, then `switch`. On an error the old epoch is still in place."""
        self.switch(self.prepare(topology, group, slot))
        logger.info("epoch %d: %s", topology.epoch, self.describe())

    def physical_ids(self, layer: int, topk_ids_TK: torch.Tensor) -> torch.Tensor:
        """The seats (int64 [T, K]) that this rank uses for logical experts: its own where it has one."""
        physical_E = self._current_epoch.physical_LE[layer]
        return physical_E.index_select(0, topk_ids_TK.reshape(-1)).view(topk_ids_TK.shape)

    def begin_step(self, num_tokens_per_rank: Sequence[int]) -> None:
        """Take the step header's token counts; see `Dispatcher`."""
        self._current.begin_step(num_tokens_per_rank)

    def pieces(self, num_tokens: int) -> list[slice]:
        """Slices of the local tokens, equally many on every rank; see `Dispatcher`."""
        return self._current.pieces(num_tokens)

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> DispatchedRows:
        """Bring rows to their experts; see `Dispatcher`."""
        faults.reach("before_dispatch")
        rows = self._current.dispatch(hidden_TD, physical_ids_TK, topk_weights_TK)
        self.num_finished += 1
        return rows

    def combine(self, expert_rows_PD: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Bring results home and add them up; see `Dispatcher`."""
        faults.reach("mid_combine")
        hidden_TD = self._current.combine(expert_rows_PD, handle)
        self.num_finished += 1
        return hidden_TD

    @property
    def buffers(self) -> CommunicationBuffers | None:
        """What was attached."""
        return self._buffers

    @property
    def traffic(self) -> TrafficCounter:
        """Bytes since the worker started, over all epochs."""
        return self._traffic

    @property
    def name(self) -> str:
        """The dispatcher in use: loopback, all_gather or all_to_all."""
        return self._current.name

    def describe(self) -> str:
        """Which dispatcher serves, how it combines, and why it was chosen."""
        if self._serving is None:
            return "no dispatcher yet: no epoch was installed"
        return self._serving.describe(self.combine_mode)

    @property
    def _current(self) -> Dispatcher:
        return self._current_epoch.dispatcher

    @property
    def _current_epoch(self) -> "EpochExchange":
        if self._serving is None:
            raise ValueError("no epoch is installed: attach_buffers and install come before the first step")
        return self._serving

    def _check(self, topology: Topology, group: CommGroup, slot: int) -> CommunicationBuffers:
        if self._buffers is None:
            raise ValueError("no buffers are attached: attach_buffers comes before install")
        if group.epoch != topology.epoch or group.slots != topology.slots:
            raise ValueError(
                f"group is of epoch {group.epoch} with slots {group.slots}, "
                f"the topology is of epoch {topology.epoch} with slots {topology.slots}"
            )
        if topology.rank_of(slot) != group.rank:
            raise ValueError(f"slot {slot} has rank {topology.rank_of(slot)}, its group says {group.rank}")
        specs, placement = self._buffers.specs, topology.placement
        if placement.num_layers != len(specs) or any(spec.num_experts != placement.num_experts for spec in specs):
            raise ValueError(
                f"the placement has {placement.num_layers} layers of {placement.num_experts} experts, "
                f"the model has {[spec.num_experts for spec in specs]}"
            )
        limit = self._buffers.capacity.max_workers
        if topology.size > limit:
            raise CapacityError(f"the epoch has {topology.size} workers, the buffers hold at most {limit}")
        return self._buffers

    def _make(
        self,
        name: str,
        placement: ExpertPlacement,
        group: CommGroup,
        slot: int,
        buffers: CommunicationBuffers,
    ) -> Dispatcher:
        if name == "loopback":
            return LoopbackDispatcher(buffers=buffers, slot=slot, num_seats=placement.num_seats, traffic=self._traffic)
        fast = self.combine_mode == "fast"
        if name == "all_gather":
            seats = SeatMap(placement.slots, placement.num_seats, group.rank, self.device, own_first=False)
            return AllGatherDispatcher(group=group, buffers=buffers, seats=seats, fast=fast, traffic=self._traffic)
        seats = SeatMap(placement.slots, placement.num_seats, group.rank, self.device, own_first=True)
        return AllToAllDispatcher(group=group, buffers=buffers, seats=seats, fast=fast, traffic=self._traffic)


def _pick_seats(placement: ExpertPlacement, layer: int, slot: int, device: torch.device) -> torch.Tensor:
    """One seat for each logical expert: this worker's own replica, else the first by rank."""
    own = range(placement.physical_expert(slot, 0), placement.physical_expert(slot + 1, 0))
    picks = [
        next((physical for physical in homes if physical in own), homes[0])
        for homes in placement.logical_to_physical(layer)
    ]
    return torch.tensor(picks, dtype=torch.int64, device=device)
