"""The start sequence against members made of coroutines: order, deadlines, and whom an error names."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from moeray.comm.errors import CheckpointError, ControlTimeout, StartupError, WorkerDied
from moeray.elastic.board import Board
from moeray.elastic.membership import Membership
from moeray.elastic.startup import StartDeadlines, bring_up, take_down
from tests.support.fake_cluster import FakeCluster, FakeMember, FakeProcess

DEADLINES = StartDeadlines(create_s=0.2, load_s=0.2, join_s=0.2)
Hook = Callable[[], Coroutine[Any, Any, None]]


class ScriptedMember(FakeMember):
    """Answers at once, except in phases that have a hook."""

    def __init__(self, slot: int, calls: list[tuple[int, str]], hooks: dict[str, Hook]) -> None:
        cluster = FakeCluster(num_experts=4)
        cluster.calls = calls
        for name, hook in hooks.items():
            cluster.fail(slot, name, lambda _, hook=hook: hook())  # type: ignore[misc]
        super().__init__(FakeProcess(cluster, slot, 0))


async def hang() -> None:
    await asyncio.Event().wait()


def raising(error: Exception) -> Hook:
    async def hook() -> None:
        raise error

    return hook


def run(hooks: dict[int, dict[str, Hook]], num_workers: int = 3) -> tuple[Board, list[tuple[int, str]]]:
    calls: list[tuple[int, str]] = []

    async def body() -> Board:
        board = Board(Membership.starting(num_workers=num_workers, num_layers=1, num_experts=4, num_seats=4))
        members = [ScriptedMember(slot, calls, hooks.get(slot, {})) for slot in range(num_workers)]
        await bring_up(members, board, DEADLINES, lambda: "the cluster has nothing")
        return board

    return asyncio.run(body()), calls


def test_phases_follow_each_other_for_all_workers() -> None:
    board, calls = run({})
    assert board.current.state == "serving"
    assert board.current.dispatcher == "dispatcher of 0"
    assert (0, "host_store") in calls
    assert [name for _, name in calls if name in ("host_store", "join", "serve")] == (
        ["host_store"] + ["join"] * 3 + ["serve"] * 3
    )


def test_workers_load_at_the_same_time() -> None:
    barrier = asyncio.Barrier(3)

    async def together() -> None:
        await barrier.wait()

    board, _ = run({slot: {"load": together, "join": together} for slot in range(3)})
    assert board.current.state == "serving"


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("created", "did not come up within 0.2 s; the cluster has nothing"),
        ("load", "did not load its weights within 0.2 s"),
        ("join", "did not join the group within 0.2 s"),
        ("serve", "did not start to serve within 0.2 s"),
    ],
)
def test_a_hanging_worker_is_named(phase: str, words: str) -> None:
    with pytest.raises(StartupError, match=f"^worker 2: (its process )?{words}"):
        run({2: {phase: hang}})


@pytest.mark.parametrize("phase", ["created", "load", "join", "serve"])
@pytest.mark.parametrize("error", [CheckpointError("no lm_head"), WorkerDied("its process died")])
def test_a_failing_worker_is_named_and_ends_the_start_of_the_others(phase: str, error: Exception) -> None:
    with pytest.raises(StartupError, match=f"^worker 1: {error}$"):
        run({0: {"load": hang} if phase in ("created", "load") else {}, 1: {phase: raising(error)}})


def test_loading_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeray.elastic.startup.PROGRESS_PERIOD_S", 0.001)

    async def body() -> list[float]:
        board = Board(Membership.starting(num_workers=1, num_layers=1, num_experts=4, num_seats=4))
        release = asyncio.Event()
        member = ScriptedMember(0, [], {"load": release.wait})  # type: ignore[dict-item]
        start = asyncio.create_task(bring_up([member], board, DEADLINES, str))
        seen = []
        version = -1
        while board.current.state != "serving":
            current = await board.newer_than(version, 1.0)
            version = current.version
            seen.append(current.member(0).loaded_fraction)
            if seen[-1] == 0.5:
                release.set()
        await start
        return seen

    seen = asyncio.run(body())
    assert seen == sorted(seen)
    assert {0.5, 1.0} <= set(seen)


def test_taking_down_kills_those_that_do_not_stop() -> None:
    calls: list[tuple[int, str]] = []
    hooks = {0: {"stop": hang}, 1: {"stop": raising(WorkerDied("gone"))}}
    members = [ScriptedMember(slot, calls, hooks.get(slot, {})) for slot in range(3)]
    asyncio.run(take_down(members, orderly=True, timeout_s=0.05))
    assert {slot for slot, name in calls if name == "kill"} == {0, 1, 2}


def test_taking_down_names_those_that_stay() -> None:
    members = [ScriptedMember(slot, [], {"kill": hang} if slot == 1 else {}) for slot in range(2)]
    with pytest.raises(ControlTimeout, match=r"workers \[1\] did not end within 0.05 s"):
        asyncio.run(take_down(members, orderly=False, timeout_s=0.05))


def test_a_reader_waits_for_news_and_not_longer() -> None:
    async def body() -> tuple[int, int]:
        board = Board(Membership.starting(num_workers=1, num_layers=1, num_experts=2, num_seats=2))
        late = await board.newer_than(0, 0.01)
        reader = asyncio.create_task(board.newer_than(0, 10.0))
        await asyncio.sleep(0)
        board.update(lambda now: now.loading(0))
        return late.version, (await reader).version

    assert asyncio.run(body()) == (0, 1)
