"""What the controller asks of a worker, whoever carries the calls.

`elastic/controller.py` fulfils it over Ray; tests fulfil it with coroutines. This folder does not know the worker's:
what it needs of a worker's answer is spelled out here.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from moeray.comm.calls import Address
from moeray.comm.messages import ExpertCounts, MemberStatus, Tick, TransferReport, Trouble
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair
from moeray.comm.topology import Topology


class WorkerReport(Protocol):
    """What a worker answers once its weights are loaded and its inbox listens; `worker/config.py` has the value.

    `control` is where its process takes commands.
    """

    @property
    def slot(self) -> int: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def pid(self) -> int: ...

    @property
    def node(self) -> str: ...

    @property
    def endpoint(self) -> str: ...

    @property
    def public_key(self) -> str: ...

    @property
    def control(self) -> Address | None: ...

    @property
    def dtype(self) -> str: ...

    @property
    def weights(self) -> str: ...

    @property
    def combine(self) -> str: ...

    @property
    def num_moe_layers(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def buffer_bytes(self) -> int: ...

    @property
    def seat_bytes(self) -> int: ...

    @property
    def load_s(self) -> float: ...

    @property
    def load_peak_bytes(self) -> int: ...

    @property
    def not_finite(self) -> tuple[str, ...]: ...


class Member(Protocol):
    """A handle on one incarnation of a worker. Every call may raise a one-line `MoerayError`."""

    slot: int
    incarnation: int

    async def created(self) -> None:
        """Returns once the worker's process runs and answers."""

    async def load(self, placement: ExpertPlacement | None, source: "Member | None" = None) -> WorkerReport:
        """Load the weights that the placement gives to this slot; the inbox listens afterwards.

        None loads all but the experts, for which `transfer` comes later. `source` is a worker that has the checkpoint,
        to read it from if this one's node has it not.
        """

    async def progress(self) -> float:
        """How much of the weights is loaded, 0 to 1; answers while `load` runs."""

    async def host_store(self, epoch: int) -> tuple[str, int]:
        """Open the store at which the epoch's ranks meet; returns its host and port."""

    async def join(self, topology: Topology, store: tuple[str, int]) -> str:
        """Build and warm the epoch's group; returns when all ranks are in: the dispatcher in words."""

    async def serve(self) -> None:
        """Start the step loop."""

    async def connect(self, topology: Topology, store: tuple[str, int]) -> str:
        """Build and warm the next epoch's group beside the one that serves; returns what all members must agree on."""

    async def transfer(self, topology: Topology) -> TransferReport:
        """Fill the seats that this topology gives to the slot and the serving one leaves empty."""

    async def hand_over(self, targets: tuple[int, ...]) -> int:
        """Begin to copy the KV of running sequences to these slots; returns once all full blocks are there."""

    async def commit(self, epoch: int) -> int:
        """Be ready for the prepared epoch, or to leave with it; returns its number after the switch."""

    async def discard(self, epoch: int) -> None:
        """Forget an epoch that was prepared and not committed, and stop handing over; harmless if there is none."""

    async def status(self) -> MemberStatus:
        """Where the worker stands; answers at any time."""

    async def halt(self, epoch: int) -> int:
        """Give the serving group up, and every prepared epoch before this one; returns the epoch that was left."""

    async def tick(self) -> Tick:
        """How far it is; answers at any time."""

    async def expert_load(self) -> ExpertCounts:
        """Tokens that its own steps sent to each logical expert of late, by layer; answers at any time."""

    async def nudge(self) -> None:
        """Leave the park, if it is parked: others wait for it, and their wake got lost."""

    async def assume(self, topology: Topology) -> None:
        """While halted: take this epoch, which others switched to, for the one that served."""

    async def trouble(self, seen_epoch: int) -> Trouble:
        """Returns only when the process died, its engine failed, or its group broke in an epoch after `seen_epoch`."""

    async def stop(self) -> None:
        """Leave the step loop in agreement with the other ranks."""

    async def kill(self) -> None:
        """End the process at once; returns when it is gone."""


class WorkerSource(Protocol):
    """Where workers come from. All calls but `lacks_room_for` return at once, or raise `MoerayError`."""

    def create(self, slot: int, incarnation: int, client: KeyPair) -> Member:
        """Begin to start this incarnation's process."""

    def find(self, slot: int, incarnation: int, client: KeyPair, control: Address | None) -> Member | None:
        """The handle of a process that an earlier controller started; None if it is gone.

        `control` is where the worker said that it takes commands; without it only its life can be watched and ended.
        """

    def lacks_room_for(self, num_workers: int) -> str | None:
        """None if so many more workers can start now, else what they need and what is free. May take seconds."""

    def describe_room(self) -> str:
        """What resources there are and what of them is free."""


class WorkerFactory(Protocol):
    """Creates the worker actor of one incarnation and returns its handle at once, before its process runs.

    The actor is detached and has the name that `controller_config.worker_name` gives, in the controller's namespace.
    """

    @property
    def resources(self) -> Mapping[str, float]:
        """What each worker takes of the cluster, under Ray's names."""

    def __call__(self, slot: int, incarnation: int, client: KeyPair) -> Any: ...
