"""How a deployment comes up: all workers at the same time, phase by phase, until the first epoch serves.

A failure of any worker fails the start; what was started is ended by the caller, who owns the members.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moeray.comm.errors import ControlTimeout, MoerayError, StartupError
from moeray.comm.placement import ExpertPlacement
from moeray.elastic.board import Board
from moeray.elastic.member import Member

S = TypeVar("S")
T = TypeVar("T")

PROGRESS_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDeadlines:
    """Seconds for each phase of a start.

    `create_s` covers finding resources and starting the processes, `load_s` the weights, `join_s` the group.
    """

    create_s: float = 120.0
    load_s: float = 600.0
    join_s: float = 90.0

    def __post_init__(self) -> None:
        for name, value in (("create_s", self.create_s), ("load_s", self.load_s), ("join_s", self.join_s)):
            if not value > 0:
                raise ValueError(f"{name} is {value}, must be more than 0")


async def within(seconds: float, call: Awaitable[T], member: Member, what: str) -> T:
    """The call's result; every failure becomes a `StartupError` that names the slot, a late one too."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        raise StartupError(f"worker {member.slot}: did not {what} within {seconds:g} s") from None
    except MoerayError as error:
        raise StartupError(f"worker {member.slot}: {error}") from error


async def on_all(receivers: Sequence[S], call: Callable[[S], Awaitable[T]]) -> list[T]:
    """Call all receivers at once; the first failure cancels the others and is raised."""

    async def one(receiver: S) -> T:
        return await call(receiver)

    tasks = [asyncio.create_task(one(receiver)) for receiver in receivers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow_progress(member: Member, board: Board) -> None:
    """Publishes how much a worker has loaded, until cancelled. An answer may fail to come."""
    while True:
        await asyncio.sleep(PROGRESS_PERIOD_S)
        try:
            async with asyncio.timeout(10 * PROGRESS_PERIOD_S):
                fraction = await member.progress()
        except (TimeoutError, MoerayError):
            continue
        board.update(lambda now, fraction=fraction: now.loading(member.slot, fraction))  # type: ignore[misc]


async def load_member(
    member: Member,
    board: Board,
    deadlines: StartDeadlines,
    no_room: Callable[[], str],
    placement: ExpertPlacement | None,
    source: Member | None = None,
) -> None:
    """Wait for the member's process and load its weights; the board shows each step. Raises `StartupError`.

    `placement` and `source` are those of `Member.load`.
    """
    try:
        async with asyncio.timeout(deadlines.create_s):
            await member.created()
    except TimeoutError:
        raise StartupError(
            f"worker {member.slot}: its process did not come up within {deadlines.create_s:g} s; {no_room()}"
        ) from None
    except MoerayError as error:
        raise StartupError(f"worker {member.slot}: {error}") from error
    board.update(lambda now: now.loading(member.slot))
    follower = asyncio.create_task(_follow_progress(member, board))
    try:
        load = member.load(placement, source)
        ready = await within(deadlines.load_s, load, member, "load its weights")
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
    board.update(lambda now: now.loaded(ready))


async def bring_up(
    members: Sequence[Member],
    board: Board,
    deadlines: StartDeadlines,
    no_room: Callable[[], str],
    *,
    epoch: int = 0,
) -> None:
    """Load all members, form the first epoch and let it serve; the board shows each step.

    `no_room` says in words which resources there are, for a worker that found none. Raises `StartupError`.
    """
    placement = board.current.placement
    await on_all(members, lambda member: load_member(member, board, deadlines, no_room, placement))
    topology = board.update(lambda now: now.formed(epoch)).topology
    assert topology is not None
    by_slot = {member.slot: member for member in members}
    ranks = [by_slot[slot] for slot in topology.slots]
    join_s = deadlines.join_s
    store = await within(join_s, ranks[0].host_store(topology.epoch), ranks[0], "open the group's store")
    descriptions = await on_all(ranks, lambda m: within(join_s, m.join(topology, store), m, "join the group"))
    await on_all(ranks, lambda m: within(join_s, m.serve(), m, "start to serve"))
    board.update(lambda now: now.serving(descriptions[0]))


async def take_down(members: Sequence[Member], *, orderly: bool, timeout_s: float) -> None:
    """End all members, orderly after they left their step loop. `ControlTimeout` names who is still there."""

    async def end(member: Member) -> int | None:
        if orderly:
            try:
                async with asyncio.timeout(timeout_s):
                    await member.stop()
            except (TimeoutError, MoerayError):
                pass  # the kill below does not depend on it
        try:
            async with asyncio.timeout(timeout_s):
                await member.kill()
        except TimeoutError:
            return member.slot
        return None

    left = [slot for slot in await on_all(members, end) if slot is not None]
    if left:
        raise ControlTimeout(f"workers {left} did not end within {timeout_s:g} s")
