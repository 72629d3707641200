"""What a controller must remember to be restarted: everything that the workers cannot tell it.

It is written before each act that would otherwise leave something behind that nobody knows of, as one value under one
key, so that a reader never sees half of a change.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from moeray.comm.calls import Address
from moeray.comm.errors import MoerayError, StartupError
from moeray.comm.topology import Topology
from moeray.elastic.member import WorkerReport
from moeray.elastic.membership import MemberRecord
from moeray.elastic.view import FaultView, OperationView

logger = logging.getLogger(__name__)


class StateStore(Protocol):
    """Keeps one value for as long as the deployment lives, whatever becomes of the controller.

    Every call ends within a deadline, or raises `MoerayError`.
    """

    async def read(self) -> bytes | None:
        """The value, None if there is none."""

    async def write(self, value: bytes) -> None:
        """Replace the value."""

    async def clear(self) -> None:
        """Forget the value."""


class SavedReport(msgspec.Struct, frozen=True, kw_only=True):
    """A `WorkerReport` that can be written down."""

    slot: int
    incarnation: int
    pid: int
    node: str
    endpoint: str
    public_key: str
    control: Address | None
    dtype: str
    weights: str
    combine: str
    num_moe_layers: int
    num_experts: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    weights_bytes: int
    buffer_bytes: int
    seat_bytes: int
    load_s: float
    load_peak_bytes: int
    not_finite: tuple[str, ...]

    @classmethod
    def of(cls, report: WorkerReport) -> "SavedReport":
        return cls(**{name: getattr(report, name) for name in cls.__struct_fields__})


class SavedMember(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was started, or is about to be."""

    slot: int
    incarnation: int
    state: str
    report: SavedReport | None

    @classmethod
    def of(cls, record: MemberRecord) -> "SavedMember":
        report = SavedReport.of(record.ready) if record.ready is not None else None
        return cls(slot=record.slot, incarnation=record.incarnation, state=record.state, report=report)

    def record(self) -> MemberRecord:
        """As the membership has it."""
        return MemberRecord(
            slot=self.slot,
            incarnation=self.incarnation,
            state=self.state,
            loaded_fraction=1.0 if self.report is not None else 0.0,
            ready=self.report,
        )


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """An operation that is not over. `topology` is the next one, once the joiners have told where they listen.

    `spares` are the joiners that were spares.
    """

    view: OperationView
    topology: Topology | None
    spares: tuple[int, ...]


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `generation` counts the controller's lives; `topology` is None until the first epoch serves.

    `incarnations` are the last ones that each slot has used, by its number.
    """

    generation: int
    topology: Topology | None
    dispatcher: str
    members: tuple[SavedMember, ...]
    incarnations: dict[int, int]
    next_epoch: int
    lease: int
    public_key: str
    secret_key: str
    history: tuple[OperationView, ...]
    faults: tuple[FaultView, ...]
    wanted_size: int
    in_flight: InFlight | None


class SavedLife(msgspec.Struct, frozen=True):
    """What a `SavedState` says of the life that wrote it; the rest is not read."""

    generation: int


class Journal:
    """Writes the newest state; calls from one event loop. `collect` gives the state of this moment."""

    def __init__(
        self, store: StateStore, collect: Callable[[], SavedState], *, on_superseded: Callable[[], None] = lambda: None
    ) -> None:
        """`on_superseded` is called when a later life of the controller has written."""
        self._store = store
        self._collect = collect
        self._on_superseded = on_superseded
        self._writing = asyncio.Lock()
        self._is_closed = False

    async def save(self) -> None:
        """The state of now, or a newer one, is written when this returns. Raises `MoerayError`."""
        async with self._writing:
            if not self._is_closed:
                await self._check()
                await self._store.write(msgspec.json.encode(self._collect()))

    async def check(self) -> None:
        """Returns if no later life has written. Raises `MoerayError` else, or if that cannot be told."""
        async with self._writing:
            if not self._is_closed:
                await self._check()

    async def _check(self) -> None:
        value, own = await self._store.read(), self._collect().generation
        if value is not None and msgspec.json.decode(value, type=SavedLife).generation > own:
            logger.error("life %d of the controller is over: another one has begun elsewhere", own)
            self._on_superseded()
            raise MoerayError("another controller has taken over")

    async def load(self) -> SavedState | None:
        """What an earlier life wrote. Raises `StartupError` if it cannot be read, `MoerayError` if not be reached."""
        value = await self._store.read()
        if value is None:
            return None
        try:
            return msgspec.json.decode(value, type=SavedState)
        except msgspec.DecodeError as error:
            raise StartupError(f"the controller's saved state cannot be read: {error}") from error

    async def close(self) -> None:
        """The deployment is over: forget the state, and write no more."""
        async with self._writing:
            self._is_closed = True
            await self._store.clear()
