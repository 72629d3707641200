"""What goes wrong while the size changes is undone: the reason is told, streams go on, and the next change works."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import Elastic, Streams, phase_names
from tests.support.faulty_worker import FAULTS
from tests.support.serving import ROOT, Serve, client, poll

GONE_S = 2.0
PHASES = ["planned", "provisioning", "connecting", "transferring"]


class Faulty(Elastic):
    """A deployment of two workers that fail when a file says so."""

    def __init__(self, serve: Serve, url: str, http: Any, faults: Path) -> None:
        super().__init__(url, http)
        self._serve = serve
        self._faults = faults

    def fail(self, *faults: str) -> None:
        """From now on these calls fail, and no others."""
        self._faults.write_text("\n".join(faults))

    def workers(self) -> set[int]:
        """Processes that are workers, members or not."""
        return {process.pid for process in self._serve.processes_called("WorkerActor")}

    def rolls_back(self, *faults: str, **fields: Any) -> dict[str, Any]:
        """An operation that fails so changes nothing and leaves no process; it is returned."""
        before, workers = self.topology(), self.workers()
        self.fail(*faults)
        operation = self.ended(self.start(**fields))
        self.fail()
        assert operation["outcome"] == "rolled_back", operation
        poll("the joiner's process is gone", lambda: self.workers() == workers, GONE_S)
        assert set(self.pids().values()) == workers
        after = self.topology()
        assert (after["epoch"], after["placement"]) == (before["epoch"], before["placement"])
        assert [m["state"] for m in after["members"]] == ["serving"] * len(before["members"])
        return operation


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    directory = tmp_path_factory.mktemp("serve")
    faults = directory / "faults"
    faults.touch()
    variables = {FAULTS: str(faults), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    serve = Serve(directory, "demo", variables=variables, module="tests.support.faulty_worker")
    with serve, client(serve.url()) as http:
        yield Faulty(serve, serve.url(), http, faults)


@pytest.fixture(scope="module")
def streams(faulty: Faulty) -> Streams:
    return Streams(faulty.url, count=4, max_tokens=100)


@pytest.mark.parametrize(
    ("call", "phase", "reason"),
    [
        ("load", "provisioning", "worker 2: did not start within the operation's deadline of 8 s"),
        ("connect", "connecting", "the group could not be built, slots [2] are not arrived"),
        ("transfer", "transferring", "worker 2: did not fill its seats within the 4 s of phase transferring"),
    ],
)
def test_a_joiner_that_dies_or_hangs_is_given_up_and_the_next_one_joins(
    faulty: Faulty, streams: Streams, call: str, phase: str, reason: str
) -> None:
    reached = [*PHASES[: PHASES.index(phase) + 1], "rolled_back"]
    with streams.running():
        died = faulty.rolls_back(f"2:{call}:kill", workers=3)
        assert died["reason"].startswith("worker 2: its process died")
        assert phase_names(died) == reached
        deadline = {"deadline_s": 8.0} if phase == "provisioning" else {}
        hung = faulty.rolls_back(f"2:{call}:stop", workers=3, **deadline)
        assert reason in hung["reason"]
        assert phase_names(hung) == reached
        assert faulty.scale(workers=3)["joiners"] == [2]
        faulty.scale(workers=2)


def test_a_survivor_that_cannot_build_the_group_serves_on(faulty: Faulty, streams: Streams) -> None:
    with streams.running():
        operation = faulty.rolls_back("1:connect:error", workers=3)
        assert operation["reason"] == "worker 1: slot 99 did not answer"
        assert phase_names(operation)[-2:] == ["connecting", "rolled_back"]
        assert faulty.scale(workers=3)["outcome"] == "done"
        assert faulty.scale(workers=2)["outcome"] == "done"


def test_a_worker_that_could_not_leave_stays_and_leaves_the_next_time(faulty: Faulty, streams: Streams) -> None:
    with streams.running():
        for fault, reason, phase in (
            ("1:host_store:error", "worker 1: slot 99 did not answer", "connecting"),
            ("1:transfer:bug", "worker 1: KeyError: 'surprise'", "transferring"),
            ("0:hand_over:error", "worker 0: slot 99 did not answer", "transferring"),
            ("0:hand_over:hang", "worker 0: did not hand its requests over within", "transferring"),
        ):
            operation = faulty.rolls_back(fault, retire=[0])
            assert operation["reason"].startswith(reason)
            assert phase_names(operation)[-2:] == [phase, "rolled_back"]
        faulty.scale(retire=[0])
    faulty.scale(workers=2)


def test_a_deadline_that_passes_before_the_joiner_runs_is_told(faulty: Faulty, streams: Streams) -> None:
    with streams.running():
        operation = faulty.rolls_back(workers=4, deadline_s=0.3)
        assert operation["reason"].endswith("did not start within the operation's deadline of 0.3 s")
        assert phase_names(operation) == ["planned", "provisioning", "rolled_back"]
        assert faulty.scale(workers=3)["outcome"] == "done"
        assert faulty.scale(workers=2)["outcome"] == "done"
