"""Deployments on a real Ray whose workers have no model, for tests of the controller's actor."""

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from moeray.deploy.environment import worker_variables
from moeray.deploy.launch import RayWorkerFactory, create_controller
from moeray.elastic.controller_config import ControllerConfig
from moeray.elastic.startup import StartDeadlines
from moeray.elastic.view import ClusterView
from moeray.worker.config import WorkerConfig
from tests.support import fake_worker

DEADLINE_S = 30.0


def fake_class() -> Any:
    import ray

    return ray.remote(fake_worker.FakeWorkerActor)


@dataclasses.dataclass
class Started:
    """A controller's handle, with calls that end."""

    actor: Any
    view: ClusterView | None = None

    def call(self, name: str, *args: Any) -> Any:
        import ray

        return ray.get(getattr(self.actor, name).remote(*args), timeout=DEADLINE_S)

    def until(self, *states: str) -> ClusterView:
        """Follow the view until it is in one of the states."""
        deadline = time.monotonic() + DEADLINE_S
        while self.view is None or self.view.state not in states:
            assert time.monotonic() < deadline, self.view
            self.view = self.call("view", -1 if self.view is None else self.view.version, 1.0)
        return self.view

    def until_true(self, condition: Callable[[ClusterView], bool]) -> ClusterView:
        """Follow the view until the condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        version = -1
        while True:
            assert time.monotonic() < deadline, self.view
            self.view = self.call("view", version, 1.0)
            assert self.view is not None
            if condition(self.view):
                return self.view
            version = self.view.version

    def restart(self) -> None:
        """End the controller's process; Ray starts another for the same actor."""
        import ray

        ray.kill(self.actor, no_restart=False)


def fake_factory(script: str, *, num_cpus: float = 0.0) -> RayWorkerFactory:
    """Creates `FakeWorkerActor` actors."""
    return RayWorkerFactory(
        config=WorkerConfig(model_path=script, num_seats=8, max_workers=4),
        num_cpus=num_cpus,
        num_gpus=0,
        bind_host="127.0.0.1",
        variables=worker_variables(threads=1, embedded=True, environ={}),
        resolve=fake_class,
    )


@contextmanager
def deployments() -> Iterator[Callable[..., Started]]:
    """Gives a function that starts one; at the end all are stopped."""
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(fake_worker)
    started: list[Started] = []

    def begin(script: str = "", *, num_workers: int = 2, num_cpus: float = 0.0, **changes: Any) -> Started:
        values: dict[str, Any] = {
            "deployment": f"t{uuid.uuid4().hex[:8]}",
            "num_workers": num_workers,
            "num_layers": 2,
            "num_experts": 8,
            "num_seats": 8,
            "max_workers": 4,
            "deadlines": StartDeadlines(create_s=20.0, load_s=10.0, join_s=5.0),
        }
        factory = fake_factory(script, num_cpus=num_cpus)
        found = Started(create_controller(ControllerConfig(**(values | changes)), factory))
        started.append(found)
        found.call("start")
        return found

    try:
        yield begin
    finally:
        for each in started:
            try:
                each.call("stop", False)
            except ray.exceptions.RayActorError:
                continue
            finally:
                ray.kill(each.actor, no_restart=True)


def is_gone(pid: int, within_s: float = 10.0) -> bool:
    try:
        psutil.Process(pid).wait(within_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True
