"""A restarted controller: what it remembers, put beside what the workers say."""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Literal

from moeray.comm.errors import MoerayError, StartupError, WorkerDied
from moeray.comm.messages import MemberStatus
from moeray.comm.sockets import KeyPair
from moeray.comm.topology import Topology
from moeray.elastic.board import Board
from moeray.elastic.controller_config import ControllerConfig
from moeray.elastic.fleet import Fleet
from moeray.elastic.member import Member, WorkerSource
from moeray.elastic.membership import Membership
from moeray.elastic.startup import on_all, take_down
from moeray.elastic.state import SavedMember, SavedState

logger = logging.getLogger(__name__)

# Versions of one life of the controller; those of the next are all newer.
VERSIONS_PER_LIFE = 1 << 32
LOOK_UPS = 3


@dataclass(frozen=True, slots=True)
class Adopted:
    """Members (slot, incarnation) that are gone without a trace, and whether the group has to be made again."""

    gone: tuple[tuple[int, int], ...]
    is_broken: bool


def restored(saved: SavedState, again: Membership, generation: int) -> Membership:
    """The membership as it was last written; `again` if the first epoch never served, and it must start anew."""
    version = generation * VERSIONS_PER_LIFE
    if saved.topology is None:
        return replace(again, version=version)
    return Membership(
        placement=saved.topology.placement,
        members=tuple(member.record() for member in saved.members),
        version=version,
        state="serving",
        topology=saved.topology,
        dispatcher=saved.dispatcher,
    )


async def adopt_members(
    saved: SavedState, fleet: Fleet, source: WorkerSource, board: Board, config: ControllerConfig
) -> Adopted:
    """Afterwards the fleet has all workers that live and are of use; the others are ended.

    The topology on the board is the one that the members serve. An operation in flight may still have both epochs, and
    is not judged here.
    """
    found: list[Member] = []
    for known in saved.members:
        member = await _look_up(known, fleet.client, source, config.operation_deadlines.status_s)
        if member is not None:
            found.append(member)
    if saved.topology is None:
        await take_down(found, orderly=False, timeout_s=config.stop_timeout_s)
        return Adopted(gone=(), is_broken=False)
    for member in found:
        fleet.adopt(member)
    status_s = config.operation_deadlines.status_s
    answers = await on_all(found, lambda member: _ask(member, status_s))
    in_flight = saved.in_flight.view if saved.in_flight is not None else None
    busy = {*in_flight.targets, *in_flight.leavers} if in_flight is not None else set()
    statuses = [answer for answer in answers if isinstance(answer, MemberStatus)]
    if in_flight is None:
        _adopt_topology(board, saved.topology, statuses)
    serving = board.current.topology
    assert serving is not None
    # A worker that is found dead is heard of by the watch that `adopt` began.
    handles = {(member.slot, member.incarnation) for member in found}
    gone = tuple((m.slot, m.incarnation) for m in serving.members if (m.slot, m.incarnation) not in handles)
    alive = {member.slot for member, answer in zip(found, answers, strict=True) if answer != "dead"}
    for record in board.current.members:
        is_spare = record.state == "spare" and record.slot in alive
        if record.slot not in serving.slots and record.slot not in busy and not is_spare:
            await fleet.end(record.slot, orderly=False, timeout_s=config.stop_timeout_s)
    is_repairing = in_flight is not None and in_flight.kind == "repair"
    return Adopted(gone=gone, is_broken=is_repairing or any(status.is_halted for status in statuses))


async def _look_up(known: SavedMember, client: KeyPair, source: WorkerSource, timeout_s: float) -> Member | None:
    """Raises `StartupError` if nobody can tell whether it lives, after several times of asking."""
    control = known.report.control if known.report is not None else None
    for _ in range(LOOK_UPS):
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(source.find, known.slot, known.incarnation, client, control)
        except TimeoutError:
            logger.warning("worker %d was not looked up within %g s", known.slot, timeout_s)
    raise StartupError(f"worker {known.slot}: it could not be looked up within {LOOK_UPS} times {timeout_s:g} s")


async def _ask(member: Member, timeout_s: float) -> MemberStatus | Literal["dead", "silent"]:
    """A worker that does not answer may be busy: it stays what it was, until its death is known."""
    try:
        async with asyncio.timeout(timeout_s):
            return await member.status()
    except WorkerDied:
        return "dead"
    except (TimeoutError, MoerayError) as error:
        logger.warning("worker %d does not tell where it stands: %s", member.slot, error or "no answer")
        return "silent"


def _adopt_topology(board: Board, known: Topology, statuses: list[MemberStatus]) -> None:
    """What the members serve is true, should it be newer than what was written."""
    newest = max((s.topology for s in statuses if s.topology is not None), key=lambda t: t.epoch, default=known)
    if newest.epoch > known.epoch:
        board.update(lambda now: now.switched(newest))
