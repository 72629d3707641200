"""The controller's actor on a real Ray, with workers that have no model: starts, failures, readers, ends."""

import re
import time
from collections.abc import Callable

import psutil
import pytest

from moeray.comm.errors import StartupError
from moeray.elastic.startup import StartDeadlines
from tests.support.ray_deployments import DEADLINE_S, Started, is_gone
from tests.support.serving import poll

pytestmark = pytest.mark.cluster


def test_workers_come_up_and_leave(start: Callable[..., Started]) -> None:
    deployment = start(num_workers=3)
    view = deployment.until("serving", "failed")
    assert (view.state, view.cause) == ("serving", None)
    assert [(member.slot, member.rank, member.state) for member in view.members] == [
        (0, 0, "serving"),
        (1, 1, "serving"),
        (2, 2, "serving"),
    ]
    pids = [member.pid for member in view.members]
    deployment.call("stop", True)
    assert all(pid is not None and is_gone(pid) for pid in pids)
    assert deployment.call("view", -1, 0.0).state == "stopping"


def test_workers_have_their_environment_from_the_start(start: Callable[..., Started]) -> None:
    view = start(num_workers=1).until("serving", "failed")
    assert view.members[0].pid is not None
    variables = psutil.Process(view.members[0].pid).environ()
    assert variables["MALLOC_MMAP_MAX_"] == "0"
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert variables["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("0:create:die", "worker 0: its process died"),
        ("1:create:checkpoint", "worker 1: it could not be created: .*lm_head.weight is missing"),
        ("1:load:checkpoint", "worker 1: model.safetensors: tensor lm_head.weight is missing"),
        ("0:load:die", "worker 0: its process died"),
        ("1:load:bug", "worker 1: KeyError: 'surprise'"),
        ("0:host_store:die", "worker 0: its process died"),
        ("1:join:die", "worker 1: its process died"),
        ("1:serve:bug", "worker 1: KeyError: 'surprise'"),
    ],
)
def test_a_failing_worker_is_named_and_all_are_ended(start: Callable[..., Started], script: str, cause: str) -> None:
    deployment = start(script)
    view = deployment.until("failed", "serving")
    assert view.cause is not None
    assert re.match(cause, view.cause)
    assert "\n" not in view.cause
    deployment.call("stop", False)
    assert all(is_gone(member.pid) for member in view.members if member.pid is not None)


def test_a_hanging_load_ends_at_its_deadline(start: Callable[..., Started]) -> None:
    deployment = start("1:load:hang", deadlines=StartDeadlines(create_s=20.0, load_s=1.0, join_s=5.0))
    assert deployment.until("failed").cause == "worker 1: did not load its weights within 1 s"


def test_a_worker_without_resources_is_named_with_what_the_cluster_has(start: Callable[..., Started]) -> None:
    deployment = start(num_cpus=1.0, deadlines=StartDeadlines(create_s=1.0, load_s=1.0, join_s=1.0))
    cause = deployment.until("failed").cause
    assert cause is not None
    assert "its process did not come up within 1 s; the cluster has 0 of 0 CPUs free" in cause


def test_a_death_while_serving_is_seen_and_repaired_at_once_and_the_worker_replaced(
    start: Callable[..., Started],
) -> None:
    deployment = start(num_workers=3)
    view = deployment.until("serving", "failed")
    assert view.members[1].pid is not None
    began = time.monotonic()
    psutil.Process(view.members[1].pid).kill()
    view = deployment.until_true(lambda view: view.epoch > 0)
    assert time.monotonic() - began < 2.0
    assert {member.slot for member in view.members if member.rank is not None} == {0, 2}
    view = deployment.until_true(lambda view: sum(member.rank is not None for member in view.members) == 3)
    assert [(member.slot, member.incarnation) for member in view.members] == [(0, 0), (1, 1), (2, 0)]
    (fault,) = deployment.call("faults")
    assert (fault.slot, fault.incarnation, fault.kind) == (1, 0, "died")
    assert fault.cause.startswith("its process died")
    assert 0 < fault.recovered_s < 2.0


def test_a_failed_engine_is_replaced(start: Callable[..., Started]) -> None:
    deployment = start("0.0:engine:fail")
    view = deployment.until_true(lambda view: any(m.incarnation == 1 and m.rank is not None for m in view.members))
    assert view.state == "serving"
    (fault,) = deployment.call("faults")
    assert fault.cause == "its engine failed: KeyError: 'surprise'"


def test_each_front_end_gets_a_newer_lease_and_the_same_keys(start: Callable[..., Started]) -> None:
    deployment = start(num_workers=1)
    first, second = deployment.call("attach"), deployment.call("attach")
    assert second.lease == first.lease + 1
    assert (first.public_key, first.secret_key) == (second.public_key, second.secret_key)
    assert len(first.public_key) == 40
    assert first.public_key != first.secret_key


def test_a_reader_without_news_gets_the_old_view_after_its_timeout(start: Callable[..., Started]) -> None:
    deployment = start(num_workers=1)
    view = deployment.until("serving")
    began = time.monotonic()
    assert deployment.call("view", view.version, 0.3) == view
    assert 0.3 <= time.monotonic() - began < 5.0


def test_a_second_controller_of_one_name_is_refused(start: Callable[..., Started]) -> None:
    start(num_workers=1, deployment="twice")
    with pytest.raises(StartupError, match="deployment 'twice' already runs in this cluster"):
        start(num_workers=1, deployment="twice")


def test_without_readers_everything_ends(start: Callable[..., Started]) -> None:
    import ray

    deployment = start(num_workers=1, orphan_timeout_s=0.5)
    view = deployment.until("serving", "failed")
    assert view.members[0].pid is not None
    assert is_gone(view.members[0].pid)

    def controller_is_gone() -> bool:
        try:
            deployment.call("attach")
        except ray.exceptions.RayActorError:
            return True
        return False

    poll("the controller is gone", controller_is_gone, DEADLINE_S)
