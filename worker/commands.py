"""What a worker's other threads ask of its engine's thread, through `Inbox.post`. Never from the network."""

from concurrent.futures import Future
from dataclasses import dataclass

from moeray.comm.exchange import EpochExchange
from moeray.comm.group import CommGroup
from moeray.comm.topology import Topology


@dataclass(frozen=True, slots=True)
class PreparedEpoch:
    """An epoch that could serve: its group is warm and its dispatcher made."""

    topology: Topology
    group: CommGroup
    exchange: EpochExchange


@dataclass(frozen=True, slots=True, eq=False)
class CommitEpoch:
    """Say `ready` from now on; `done` gets the epoch once the first header of the new group came round.

    `prepared` is None for a worker that is not in the epoch: its `done` comes when its sequences are handed over.
    """

    epoch: int
    prepared: PreparedEpoch | None
    done: "Future[int]"


@dataclass(frozen=True, slots=True, eq=False)
class Halt:
    """The serving group is given up: leave it before the next step, and wait for the commit of a later epoch.

    Epochs before `epoch` are void from now on. `done` gets the epoch that is left once nothing of it runs any more.
    """

    epoch: int
    done: "Future[int]"


@dataclass(frozen=True, slots=True, eq=False)
class StartHandOver:
    """Copy KV to these slots from now on; `done` gets the number of blocks once the existing ones are copied.

    Without targets an earlier hand-over is called off.
    """

    targets: tuple[int, ...]
    done: "Future[int]"
