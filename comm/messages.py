"""Messages that keep the group together, apart from requests and their tokens. No torch here.

Everything that travels over a ZeroMQ socket is a msgspec struct of a tagged union: decoding rejects unknown tags,
missing fields and wrong types, and nothing is ever unpickled.
"""

from dataclasses import dataclass

import msgspec

from moeray.comm.topology import Topology

# Tokens of each logical expert, by MoE layer.
ExpertCounts = tuple[tuple[int, ...], ...]


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Worker to worker: `slot` has left the park and waits in the header exchange of this step."""

    epoch: int
    step: int
    slot: int


class KVBlock(msgspec.Struct, frozen=True, tag="kv"):
    """Worker to worker: a full block of the KV cache, all layers, under the name of the prefix that it ends.

    Whoever gets it may keep it as a known prefix, or drop it: the block can always be computed again.
    """

    name: bytes
    payload: bytes


class StopEngine(msgspec.Struct, frozen=True, tag="stop"):
    """From the worker's own actor, never from the network: leave the step loop.

    The step header carries the wish to the other ranks, and all leave at the same step.
    """


class Nudge(msgspec.Struct, frozen=True, tag="nudge"):
    """From the worker's own actor: a peer waits in the header exchange, whose wake got lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What a member read to fill the seats of the next epoch."""

    num_experts: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """How far a member is at this moment.

    `position` counts the collectives of its epoch that it has begun, `progress` everything that it finishes, layer by
    layer, `num_requests` the sequences that it has.
    """

    epoch: int
    position: int
    progress: int
    is_parked: bool
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What a member could not get over by itself, in one line.

    Fatal is what ended its step loop, or its process. Otherwise its group broke in this epoch, which is evidence only:
    it keeps its sequences and waits for another epoch.
    """

    epoch: int
    reason: str
    is_fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """Where a member stands, for a controller that has lost its memory. `epoch` is -1 before the first.

    `prepared_epoch` has a warm group that does not serve yet; `committed_epoch` is the latest that the member has
    promised to switch to, whether it has done so or not. `dispatcher` says in words how rows travel. One that is halted
    has given its epoch's group up and waits for another.
    """

    slot: int
    incarnation: int
    epoch: int
    prepared_epoch: int | None
    committed_epoch: int | None
    topology: Topology | None
    is_serving: bool
    is_halted: bool = False
    dispatcher: str = ""
