"""The state of a deployment's members as one immutable value; every change makes the next one.

Pure: no I/O, no clock. The controller holds the current value, so that every reader sees one
consistent picture.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from moeray.comm.errors import StartupError
from moeray.comm.placement import ExpertPlacement
from moeray.comm.topology import Member, Topology
from moeray.elastic.member import WorkerReport
from moeray.elastic.view import ClusterView, MemberView, ModelView

# What all workers must have arrived at alike, or their group would compute different things.
AGREED_FIELDS = (
    "num_moe_layers",
    "num_experts",
    "dtype",
    "combine",
    "max_model_len",
    "vocab_size",
    "eos_token_ids",
)


def _as_member(ready: WorkerReport) -> Member:
    return Member(
        slot=ready.slot,
        incarnation=ready.incarnation,
        node=ready.node,
        endpoint=ready.endpoint,
        public_key=ready.public_key,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """One worker on its way into the group. `state` is one of `view.MEMBER_STATES`."""

    slot: int
    incarnation: int
    state: str = "starting"
    loaded_fraction: float = 0.0
    ready: WorkerReport | None = None

    def view(self, topology: Topology | None, placement: ExpertPlacement) -> MemberView:
        """Rank and experts come from the topology alone; before there is one, experts from the planned placement."""
        ready = self.ready
        is_member = topology is not None and topology.has(self.slot, self.incarnation)
        has_seats = is_member or (topology is None and self.slot in placement.slots)
        return MemberView(
            slot=self.slot,
            incarnation=self.incarnation,
            rank=topology.rank_of(self.slot) if topology is not None and is_member else None,
            pid=ready.pid if ready else None,
            node=ready.node if ready else None,
            state=self.state,
            num_experts=placement.num_experts_of(self.slot) if has_seats else 0,
            endpoint=ready.endpoint if ready else None,
            public_key=ready.public_key if ready else None,
            loaded_fraction=self.loaded_fraction,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Who is a member and how far each has come. `topology` is None until the first epoch is formed.

    `members` are all workers that were started and have not ended, in slot order: those of the topology, and beside
    them joiners, spares, and leavers that are out of the group. `placement` is the topology's, once there is one.
    """

    placement: ExpertPlacement
    members: tuple[MemberRecord, ...]
    version: int = 0
    state: str = "starting"
    cause: str | None = None
    topology: Topology | None = None
    dispatcher: str = ""

    @classmethod
    def starting(
        cls, *, num_workers: int, num_layers: int, num_experts: int, num_seats: int, incarnation: int = 0
    ) -> "Membership":
        """Slots 0..num_workers-1 and a contiguous placement. `ValueError` if the seats are too few."""
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}, must be at least 1")
        slots = range(num_workers)
        return cls(
            placement=ExpertPlacement.contiguous(
                num_layers=num_layers, num_experts=num_experts, slots=slots, num_seats=num_seats
            ),
            members=tuple(MemberRecord(slot=slot, incarnation=incarnation) for slot in slots),
        )

    def member(self, slot: int) -> MemberRecord:
        """The slot's record; `ValueError` if there is none."""
        for record in self.members:
            if record.slot == slot:
                return record
        raise ValueError(f"slot {slot} is unknown, slots are {self.slots}")

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots that a process has, whatever its state."""
        return tuple(record.slot for record in self.members)

    def slots_in(self, *states: str) -> tuple[int, ...]:
        """The slots in one of these states."""
        return tuple(record.slot for record in self.members if record.state in states)

    def added(self, slot: int, incarnation: int) -> "Membership":
        """A worker that is about to be started, for the next epoch or as a spare. `ValueError` if the slot is taken."""
        if slot in self.slots:
            raise ValueError(f"slot {slot} is taken, must be free; slots are {self.slots}")
        members = (*self.members, MemberRecord(slot=slot, incarnation=incarnation))
        members = tuple(sorted(members, key=lambda record: record.slot))
        return replace(self, members=members, version=self.version + 1)

    def removed(self, slot: int) -> "Membership":
        """The slot's process is gone. `ValueError` if the slot is in the group."""
        if slot not in self.slots:
            return self
        if self.topology is not None and self.is_in_group(slot, self.member(slot).incarnation):
            raise ValueError(f"slot {slot} is a member of epoch {self.topology.epoch}, must leave the group first")
        members = tuple(record for record in self.members if record.slot != slot)
        return replace(self, members=members, version=self.version + 1)

    def marked(self, slots: Iterable[int], state: str) -> "Membership":
        """These slots are in this state now, all at once."""
        chosen = set(slots)
        members = tuple(replace(r, state=state) if r.slot in chosen else r for r in self.members)
        if members == self.members:
            return self
        return replace(self, members=members, version=self.version + 1)

    def is_in_group(self, slot: int, incarnation: int) -> bool:
        """Whether this worker, in this life, is a member of the serving epoch."""
        return self.topology is not None and self.topology.has(slot, incarnation)

    @property
    def survivors(self) -> tuple[int, ...]:
        """Members of the serving epoch that are not dead."""
        return tuple(r.slot for r in self.members if r.state != "dead" and self.is_in_group(r.slot, r.incarnation))

    def lost(self, slots: Iterable[int]) -> "Membership":
        """These members' processes are gone, or will be: the group is to be made again without them."""
        return self.marked(slots, "dead")

    def recovering(self, cause: str) -> "Membership":
        """Those that are left cannot serve: others have to start first."""
        return replace(self, state="recovering", cause=cause, version=self.version + 1)

    def replaced(self, slot: int, incarnation: int) -> "Membership":
        """A dead member's slot gets another process; the epoch that both are not in any more has yet to come."""
        if self.member(slot).state != "dead":
            raise ValueError(f"slot {slot} is {self.member(slot).state}, must be dead to be replaced")
        return self._with(MemberRecord(slot=slot, incarnation=incarnation))

    def joining_as(self, slot: int) -> Member:
        """What the slot's loaded worker is in the next topology."""
        return _as_member(self._ready(self.member(slot)))

    def switched(self, topology: Topology) -> "Membership":
        """The group's next epoch serves: all of its members, at once.

        Who is not in it any more is leaving, unless it is dead.
        """
        before = self.topology.slots if self.topology else ()
        members = tuple(
            replace(record, state="serving")
            if record.slot in topology.slots
            else replace(record, state="leaving")
            if record.slot in before and record.state != "dead"
            else record
            for record in self.members
        )
        return replace(
            self,
            members=members,
            state="serving",
            cause=None,
            topology=topology,
            placement=topology.placement,
            version=self.version + 1,
        )

    def described(self, dispatcher: str) -> "Membership":
        """How rows travel in this epoch, in the ranks' words."""
        if dispatcher in ("", self.dispatcher):
            return self
        return replace(self, dispatcher=dispatcher, version=self.version + 1)

    def _with(self, record: MemberRecord) -> "Membership":
        members = tuple(record if old.slot == record.slot else old for old in self.members)
        return replace(self, members=members, version=self.version + 1)

    def loading(self, slot: int, fraction: float = 0.0) -> "Membership":
        """The slot's process runs and has loaded this fraction; fractions never go back."""
        record = self.member(slot)
        fraction = max(record.loaded_fraction, min(fraction, 1.0))
        if record.state == "loading" and fraction == record.loaded_fraction:
            return self
        return self._with(replace(record, state="loading", loaded_fraction=fraction))

    def loaded(self, ready: WorkerReport) -> "Membership":
        """The slot's weights are in memory. `StartupError` if it saw another checkpoint."""
        record = self.member(ready.slot)
        if ready.incarnation != record.incarnation:
            raise StartupError(
                f"worker {ready.slot}: incarnation {ready.incarnation} answered, not {record.incarnation}"
            )
        for name, found, expected in (
            ("num_moe_layers", ready.num_moe_layers, self.placement.num_layers),
            ("num_experts", ready.num_experts, self.placement.num_experts),
        ):
            if found != expected:
                raise StartupError(f"worker {ready.slot}: its checkpoint has {name} {found}, expected {expected}")
        if (other := self._another_ready(ready.slot)) is not None:
            self._check_agreement(ready, other)
        return self._with(replace(record, state="joining", loaded_fraction=1.0, ready=ready))

    def _another_ready(self, slot: int) -> WorkerReport | None:
        """What a member of the group answered, if there is a group."""
        if self.topology is None:
            return None
        others = (r for r in self.members if r.ready is not None and r.slot != slot and r.slot in self.topology.slots)
        return next((record.ready for record in others), None)

    @staticmethod
    def _check_agreement(ready: WorkerReport, first: WorkerReport) -> None:
        for name in AGREED_FIELDS:
            if getattr(ready, name) != getattr(first, name):
                raise StartupError(
                    f"worker {ready.slot}: {name} is {getattr(ready, name)!r}, "
                    f"worker {first.slot} has {getattr(first, name)!r}"
                )

    def formed(self, epoch: int = 0) -> "Membership":
        """The first epoch from the workers' answers. `StartupError` names the first field on which two disagree."""
        readies = [self._ready(record) for record in self.members]
        for ready in readies[1:]:
            self._check_agreement(ready, readies[0])
        members = tuple(_as_member(ready) for ready in readies)
        topology = Topology(epoch=epoch, members=members, placement=self.placement)
        return replace(self, topology=topology, version=self.version + 1)

    def serving(self, dispatcher: str) -> "Membership":
        """All ranks step. `dispatcher` is what the ranks chose, in words."""
        if self.topology is None:
            raise ValueError("topology is None, an epoch must be formed before it serves")
        members = tuple(replace(record, state="serving") for record in self.members)
        return replace(self, members=members, state="serving", dispatcher=dispatcher, version=self.version + 1)

    def failed(self, cause: str, *, dead: int | None = None) -> "Membership":
        """The deployment cannot serve; the first cause stays. `dead` is the slot whose process is gone."""
        members = tuple(replace(r, state="dead") if r.slot == dead else r for r in self.members)
        return replace(self, members=members, state="failed", cause=self.cause or cause, version=self.version + 1)

    def stopping(self) -> "Membership":
        """An orderly end; a cause that was there stays."""
        return replace(self, state="stopping", version=self.version + 1)

    def view(self) -> ClusterView:
        """The picture for readers outside the controller."""
        return ClusterView(
            version=self.version,
            state=self.state,
            cause=self.cause,
            epoch=self.topology.epoch if self.topology else 0,
            members=tuple(record.view(self.topology, self.placement) for record in self.members),
            placement=self.placement.assignments,
            model=self._model(),
        )

    def _ready(self, record: MemberRecord) -> WorkerReport:
        if record.ready is None:
            raise ValueError(f"slot {record.slot} is {record.state}, must be loaded before it is in an epoch")
        return record.ready

    def _model(self) -> ModelView | None:
        if self.topology is None:
            return None
        readies = [r.ready for r in self.members if r.slot in self.topology.slots and r.ready is not None]
        if not readies:
            return None
        first = readies[0]
        return ModelView(
            dtype=first.dtype,
            weights=first.weights,
            combine=first.combine,
            dispatcher=self.dispatcher,
            max_model_len=first.max_model_len,
            vocab_size=first.vocab_size,
            eos_token_ids=first.eos_token_ids,
            num_moe_layers=first.num_moe_layers,
            num_experts=first.num_experts,
            num_seats=self.placement.num_seats,
            kv_blocks_per_worker=min(ready.num_blocks for ready in readies),
            weights_bytes_per_worker=max(ready.weights_bytes for ready in readies),
            buffer_bytes_per_worker=max(ready.buffer_bytes for ready in readies),
            seat_bytes=first.seat_bytes,
            load_s=max(ready.load_s for ready in readies),
            load_peak_bytes_per_worker=max(ready.load_peak_bytes for ready in readies),
            not_finite=tuple(dict.fromkeys(name for ready in readies for name in ready.not_finite)),
        )
