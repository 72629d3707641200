"""The handles of all workers of a deployment: how one is started, watched, and ended, whatever it is for."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from moeray.comm.errors import ControlTimeout, MoerayError, WorkerDied
from moeray.comm.messages import Trouble
from moeray.comm.sockets import KeyPair
from moeray.elastic.board import Board
from moeray.elastic.member import Member, WorkerSource
from moeray.elastic.startup import StartDeadlines, load_member, take_down

logger = logging.getLogger(__name__)


def _note_error(task: asyncio.Task[None]) -> None:
    """Whoever waits for the task gets its error; nobody may be waiting, and that is no reason to complain."""
    if not task.cancelled():
        task.exception()


class Fleet:
    """All calls come from one event loop.

    `save` writes the controller's state; `on_trouble` hears of deaths and of broken groups.
    """

    def __init__(
        self,
        source: WorkerSource,
        board: Board,
        *,
        client: KeyPair,
        deadlines: StartDeadlines,
        save: Callable[[], Awaitable[None]],
        on_trouble: Callable[[Member, Trouble], None],
    ) -> None:
        self.client = client
        self.incarnations: dict[int, int] = {}
        self._source = source
        self._board = board
        self._deadlines = deadlines
        self._save = save
        self._on_trouble = on_trouble
        self._members: dict[int, Member] = {}
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._loads: dict[int, asyncio.Task[None]] = {}

    @property
    def members(self) -> list[Member]:
        """All that have a process, in slot order."""
        return [self._members[slot] for slot in sorted(self._members)]

    def member(self, slot: int) -> Member:
        """The handle of the slot's worker; `WorkerDied` if there is none."""
        member = self._members.get(slot)
        if member is None:
            raise WorkerDied("it has no process")
        return member

    def has(self, slot: int) -> bool:
        """Whether the slot has a process, as far as is known."""
        return slot in self._members

    def next_incarnation(self, slot: int) -> int:
        """One more than was ever used for the slot."""
        return self.incarnations.get(slot, -1) + 1

    def create(self, slot: int, incarnation: int) -> Member:
        """Start the process of a worker that is on the board, and watch it. Raises `MoerayError`."""
        self.incarnations[slot] = max(incarnation, self.incarnations.get(slot, -1))
        member = self._source.create(slot, incarnation, self.client)
        self.adopt(member)
        return member

    def adopt(self, member: Member) -> None:
        """Keep and watch a worker whose process runs already."""
        self._members[member.slot] = member
        self._watches[member.slot] = asyncio.get_running_loop().create_task(self._watch(member))

    def begin(self, slot: int) -> None:
        """Put a new worker into a free slot, or that of a dead one whose process was ended, and start to load all but
        its experts; `ready` waits for it.
        """
        incarnation = self.next_incarnation(slot)
        self.incarnations[slot] = incarnation
        is_taken = slot in self._board.current.slots
        self._board.update(lambda now: now.replaced(slot, incarnation) if is_taken else now.added(slot, incarnation))
        load = asyncio.get_running_loop().create_task(self._load(slot, incarnation))
        load.add_done_callback(_note_error)
        self._loads[slot] = load

    async def _load(self, slot: int, incarnation: int) -> None:
        await self._save()
        member = self.create(slot, incarnation)
        serving = self._board.current.slots_in("serving")
        source = self._members.get(serving[0]) if serving else None
        await load_member(member, self._board, self._deadlines, self._source.describe_room, None, source)

    async def ready(self, slot: int) -> None:
        """Returns once a worker that was begun has loaded, or at once if it has. Raises `MoerayError`."""
        load = self._loads.get(slot)
        if load is None:
            self.member(slot)
            return
        await asyncio.wait({load})
        if load.cancelled():
            raise MoerayError(f"worker {slot}: it was ended while it loaded")
        load.result()

    async def end(self, slot: int, *, orderly: bool, timeout_s: float) -> None:
        """End the slot's process and take it off the board, together with a load that is not over.

        Returns when it is gone; a process that stays is reported in the log, and its incarnation never used again.
        """
        await self.kill(slot, orderly=orderly, timeout_s=timeout_s)
        self._board.update(lambda now: now.removed(slot))
        try:
            await self._save()
        except MoerayError as error:
            logger.warning("the controller's state could not be saved: %s", error)

    async def kill(self, slot: int, *, orderly: bool = False, timeout_s: float) -> None:
        """As `end`, and the slot stays on the board."""
        load = self._loads.pop(slot, None)
        if load is not None:
            load.cancel()
            await asyncio.wait({load})
        watch = self._watches.pop(slot, None)
        if watch is not None:
            watch.cancel()
        member = self._members.pop(slot, None)
        if member is not None:
            try:
                await take_down([member], orderly=orderly, timeout_s=timeout_s)
            except ControlTimeout as error:
                logger.error("%s", error)

    async def take_down(self, *, orderly: bool, timeout_s: float) -> None:
        """End all; see `startup.take_down`."""
        for task in (*self._loads.values(), *self._watches.values()):
            task.cancel()
        await take_down(self.members, orderly=orderly, timeout_s=timeout_s)

    async def _watch(self, member: Member) -> None:
        seen_epoch = -1
        while True:
            trouble = await member.trouble(seen_epoch)
            if self._members.get(member.slot) is not member:
                return
            self._on_trouble(member, trouble)
            if trouble.is_fatal:
                return
            seen_epoch = trouble.epoch
