"""Workers die, hang, or lose their network at named points, under streams: nothing is lost, all is as before soon."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from moeray.comm.faults import VARIABLE
from tests.support.elastic import Elastic, Streams
from tests.support.serving import Serve, client, poll

SIZE = 3
SOON_S = 60.0
STALL_S = 1.5
MAX_REBALANCES = 4


class Breakable(Elastic):
    """A deployment of three workers and a spare, whose workers fail where a file says so."""

    def __init__(self, serve: Serve, url: str, http: Any, file: Path) -> None:
        super().__init__(url, http)
        self.serve = serve
        self._file = file

    def fail(self, *faults: str) -> None:
        """From now on, and nothing that was asked for before."""
        self._file.write_text("\n".join(faults))

    def faults(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.http.get("/faults").json()["faults"]
        return answer

    def identities(self) -> dict[int, int]:
        """The members' process ids by slot."""
        return {slot: member["pid"] for slot, member in self.members().items()}

    def is_whole(self) -> bool:
        """Three serve, another waits, and nothing goes on."""
        topology = self.topology()["members"]
        states = sorted(member["state"] for member in topology)
        return states == ["serving"] * SIZE + ["spare"] and self.is_quiet()

    def replaced(self) -> None:
        """Three serve, and no operation runs."""
        poll("the lost are replaced", lambda: len(self.slots) == SIZE and self.is_quiet(), SOON_S)

    def is_quiet(self) -> bool:
        return all(operation["outcome"] for operation in self.operations())

    def whole(self) -> None:
        poll("three workers serve and one is a spare", self.is_whole, SOON_S)

    def new_faults(self, count: int, known: int) -> list[dict[str, Any]]:
        """What came after the known ones; waits for so many, all over."""

        def found() -> bool:
            faults = self.faults()[known:]
            return len(faults) >= count and all(fault["recovered_s"] is not None for fault in faults)

        poll(f"{count} faults are over", found, SOON_S)
        return self.faults()[known:]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Breakable]:
    directory = tmp_path_factory.mktemp("serve")
    file = directory / "faults"
    file.touch()
    options = ("--workers", f"{SIZE}", "--max-workers", "5", "--spares", "1", "--kv-cache-gib", "0.05")
    serve = Serve(directory, "demo", *options, variables={VARIABLE: str(file)})
    with serve, client(serve.url()) as http:
        yield Breakable(serve, serve.url(), http, file)


@pytest.fixture(scope="module")
def streams(deployment: Breakable) -> Streams:
    return Streams(deployment.url, count=6, max_tokens=100)


@pytest.fixture
def known(deployment: Breakable) -> Iterator[int]:
    """The number of faults before the test, which begins and ends with all three workers."""
    deployment.whole()
    yield len(deployment.faults())
    deployment.fail()
    deployment.whole()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_kill_9_of_any_member(deployment: Breakable, streams: Streams, known: int, which: int) -> None:
    before = deployment.identities()
    slot = sorted(before)[which]
    with streams.running():
        time.sleep(0.5)
        psutil.Process(before[slot]).kill()
        (fault,) = deployment.new_faults(1, known)
        deployment.replaced()
    assert (fault["slot"], fault["kind"]) == (slot, "died")
    assert fault["recovered_s"] < 2.0
    after = deployment.identities()
    assert {pid for pid in after.values() if pid in before.values()} == set(before.values()) - {before[slot]}
    kinds = [(operation["kind"], operation["outcome"]) for operation in deployment.operations()[-2:]]
    assert kinds == [("repair", "done"), ("replace", "done")]


@pytest.mark.parametrize("point", ["before_header", "before_dispatch", "mid_combine", "before_commit", "after_commit"])
def test_a_death_at_any_point_of_a_step(deployment: Breakable, streams: Streams, known: int, point: str) -> None:
    slot = min(deployment.identities())
    with streams.running():
        deployment.fail(f"{slot} {point} exit step=20")
        (fault,) = deployment.new_faults(1, known)
        deployment.fail()
        deployment.replaced()
    assert (fault["slot"], fault["kind"]) == (slot, "died")


def test_a_connection_that_breaks_costs_nobody_its_place(deployment: Breakable, streams: Streams, known: int) -> None:
    before = deployment.identities()
    slot = max(before)
    with streams.running():
        deployment.fail(f"{slot} mid_combine raise step=20")
        (fault,) = deployment.new_faults(1, known)
    assert fault["kind"] == "lost its group"
    assert deployment.identities() == before


def reset_connections(processes: list[psutil.Process]) -> int:
    """Reset every TCP connection between these processes; how many there were."""
    ends = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it was replaced
            for found in process.net_connections(kind="tcp"):
                if found.status == psutil.CONN_ESTABLISHED:
                    ends[found.laddr] = found.raddr
    inner = [(near, far) for near, far in ends.items() if far in ends]
    for near, far in inner:
        words = ["sport", "=", f":{near.port}", "dport", "=", f":{far.port}"]
        subprocess.run(["ss", "-K", *words], check=True, capture_output=True)
    return len(inner)


def can_reset() -> bool:
    """Whether this machine lets us: a pair of sockets is tried."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
            try:
                subprocess.run(["ss", "-K", "dport", "=", f":{port}"], check=False, capture_output=True)
            except FileNotFoundError:
                return False
            client.settimeout(0.5)
            try:
                client.recv(1)
            except ConnectionError:
                return True
            except TimeoutError:
                return False
    return True


def test_connections_that_are_reset_lose_nothing(deployment: Breakable, streams: Streams, known: int) -> None:
    if not can_reset():
        pytest.skip("this kernel or user cannot reset other processes' connections (ss -K)")
    before = deployment.identities()
    workers = [psutil.Process(pid) for pid in before.values()]
    num_reset = 0
    with streams.running():
        for members in (workers, [*workers, *deployment.serve.processes_called(r"moeray\.deploy\.frontend")]) * 2:
            time.sleep(0.7)
            num_reset += reset_connections(members)
        deployment.new_faults(1, known)
    assert num_reset > 0
    found = [(fault["slot"], fault["kind"], fault["cause"]) for fault in deployment.faults()[known:]]
    assert deployment.identities() == before, f"{found}"
    assert {kind for _, kind, _ in found} == {"lost its group"}


def test_a_worker_that_hangs_in_a_step_is_found_and_ended(deployment: Breakable, streams: Streams, known: int) -> None:
    before = deployment.identities()
    slot = sorted(before)[1]
    with streams.running():
        deployment.fail(f"{slot} mid_combine stop step=20")
        (fault,) = deployment.new_faults(1, known)
        deployment.fail()
        deployment.replaced()
    assert (fault["slot"], fault["kind"]) == (slot, "stalled")
    assert fault["cause"].startswith(f"nobody got on for {STALL_S:g} s, and it is ")
    assert before[slot] not in deployment.identities().values()
    assert not psutil.pid_exists(before[slot]) or psutil.Process(before[slot]).status() == psutil.STATUS_ZOMBIE


def test_two_that_hang_at_once_are_given_up_together(deployment: Breakable, streams: Streams, known: int) -> None:
    before = deployment.identities()
    hung = sorted(before)[:2]
    with streams.running():
        time.sleep(0.5)
        for slot in hung:
            os.kill(before[slot], signal.SIGSTOP)
        faults = deployment.new_faults(2, known)
        deployment.replaced()
    assert sorted(fault["slot"] for fault in faults) == hung
    assert sorted(fault["kind"] for fault in faults) == ["stalled", "was silent"]
    assert max(fault["recovered_s"] for fault in faults) < 2 * STALL_S


def test_slow_is_not_dead(deployment: Breakable, streams: Streams, known: int) -> None:
    before = deployment.identities()
    slots = sorted(before)
    with streams.running():
        deployment.fail(f"{slots[0]} before_dispatch delay step=10 seconds=0.9")
        time.sleep(1.0)
        os.kill(before[slots[1]], signal.SIGSTOP)
        time.sleep(STALL_S - 0.6)
        os.kill(before[slots[1]], signal.SIGCONT)
        time.sleep(STALL_S + 0.5)
    assert deployment.identities() == before
    assert len(deployment.faults()) == known


def test_a_stopped_worker_is_found_while_all_rest(deployment: Breakable, known: int) -> None:
    before = deployment.identities()
    slot = max(before)
    poll("all rest", deployment.is_idle, SOON_S)
    os.kill(before[slot], signal.SIGSTOP)
    (fault,) = deployment.new_faults(1, known)
    assert (fault["slot"], fault["kind"]) == (slot, "stalled")


@pytest.mark.parametrize("point", ["ready_header", "at_switch"])
def test_a_death_at_the_switch(deployment: Breakable, streams: Streams, known: int, point: str) -> None:
    slot = min(deployment.identities())
    with streams.running():
        deployment.fail(f"{slot} {point} exit")
        operation = deployment.ended(deployment.start(workers=SIZE + 1))
        deployment.fail()
        assert operation["outcome"] in ("done", "failed")
        deployment.new_faults(1, known)
        poll("the group serves", deployment.is_quiet, SOON_S)
        poll("lost places are filled", lambda: len(deployment.slots) >= SIZE and deployment.is_quiet(), SOON_S)
        deployment.at_size(SIZE)


@pytest.mark.parametrize(
    ("who", "point", "fields"),
    [
        ("joiner", "during_group_build", {"workers": SIZE + 1}),
        ("member", "during_group_build", {"workers": SIZE + 1}),
        ("member", "during_transfer", {"workers": SIZE - 1}),
        ("leaver", "during_hand_over", {"workers": SIZE - 1}),
    ],
)
def test_a_death_during_a_change_of_size(
    deployment: Breakable, streams: Streams, known: int, who: str, point: str, fields: dict[str, Any]
) -> None:
    slots = deployment.slots
    spare = next(m["slot"] for m in deployment.topology()["members"] if m["state"] == "spare")
    slot = {"joiner": spare, "member": slots[0], "leaver": slots[-1]}[who]
    with streams.running():
        deployment.fail(f"{slot} {point} exit")
        operation = deployment.ended(deployment.start(**fields))
        deployment.fail()
        assert operation["outcome"] == "rolled_back"
        assert f"worker {slot}: its process died" in operation["reason"]
        if who != "joiner":
            deployment.new_faults(1, known)
        deployment.replaced()
    assert len(deployment.faults()) == known + (who != "joiner")


@pytest.mark.parametrize("point", ["during_group_build", "during_transfer"])
def test_a_death_during_a_rebalance(deployment: Breakable, streams: Streams, known: int, point: str) -> None:
    slot = deployment.slots[0]
    with streams.running():
        operation = _rebalance_that_fails(deployment, slot, point)
        assert operation["outcome"] == "rolled_back"
        assert f"worker {slot}: its process died" in operation["reason"]
        deployment.new_faults(1, known)
        deployment.replaced()
        assert deployment.rebalance()["kind"] == "rebalance"
    assert len(deployment.faults()) == known + 1


def _rebalance_that_fails(deployment: Breakable, slot: int, point: str) -> dict[str, Any]:
    """The slot dies in it; where it has no part in the rebalance, experts are put elsewhere first."""
    for _ in range(MAX_REBALANCES):
        deployment.fail(f"{slot} {point} exit")
        operation = deployment.ended(deployment.start_rebalance())
        deployment.fail()
        if operation["outcome"] != "done":
            break
        deployment.unbalance()
        assert slot in deployment.slots
    return operation


def test_a_second_death_within_the_repair(deployment: Breakable, streams: Streams, known: int) -> None:
    slots = deployment.slots
    with streams.running():
        deployment.fail(f"{slots[1]} during_group_build exit")
        psutil.Process(deployment.identities()[slots[0]]).kill()
        faults = deployment.new_faults(2, known)
        deployment.fail()
        deployment.replaced()
    assert {fault["slot"] for fault in faults} == {slots[0], slots[1]}


def test_all_but_one_at_once(deployment: Breakable, streams: Streams, known: int) -> None:
    before = deployment.identities()
    with streams.running():
        time.sleep(0.5)
        for slot in sorted(before)[1:]:
            psutil.Process(before[slot]).kill()
        deployment.new_faults(2, known)
        deployment.replaced()


def test_a_joiner_that_dies_right_after_it_was_admitted(deployment: Breakable, streams: Streams, known: int) -> None:
    with streams.running():
        operation = deployment.scale(workers=SIZE + 1)
        joiner = operation["joiners"][0]
        psutil.Process(deployment.identities()[joiner]).kill()
        deployment.new_faults(1, known)
        # The view shows the new member a moment before the operation that brought it is over.
        poll("it is replaced", lambda: len(deployment.slots) == SIZE + 1 and deployment.is_quiet(), SOON_S)
        deployment.scale(workers=SIZE)
