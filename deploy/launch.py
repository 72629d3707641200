"""From a checked configuration to Ray actors: how the controller is created, and how it creates workers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moeray.comm.errors import StartupError
from moeray.comm.sockets import KeyPair
from moeray.deploy.config import ServeConfig
from moeray.deploy.environment import worker_variables
from moeray.elastic.controller_config import ACTOR_NAME, ControllerConfig, namespace, worker_name
from moeray.elastic.member import WorkerFactory
from moeray.worker.config import WorkerConfig


def worker_class() -> Any:
    """The class of a worker's actor. Imported late: whoever only builds a factory loads no Ray."""
    import ray

    from moeray.worker.actor import WorkerActor

    return ray.remote(WorkerActor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkerFactory:
    """Picklable; the controller calls it for each incarnation. `resolve` gives the class, tests give another.

    `strategy` is Ray's: "DEFAULT" packs nodes up to their GPUs, "SPREAD" goes round the nodes.
    """

    config: WorkerConfig
    num_cpus: float
    num_gpus: float
    bind_host: str
    variables: Mapping[str, str] = field(default_factory=dict)
    strategy: str = "DEFAULT"
    resolve: Callable[[], Any] = worker_class

    @property
    def resources(self) -> Mapping[str, float]:
        """What each worker takes of the cluster."""
        return {"CPU": self.num_cpus, "GPU": self.num_gpus}

    def __call__(self, slot: int, incarnation: int, client: KeyPair) -> Any:
        return (
            self.resolve()
            .options(
                name=worker_name(slot, incarnation),
                lifetime="detached",
                max_restarts=0,
                max_task_retries=0,
                num_cpus=self.num_cpus,
                num_gpus=self.num_gpus,
                scheduling_strategy=self.strategy,
                runtime_env={"env_vars": dict(self.variables)},
            )
            .remote(
                slot=slot,
                incarnation=incarnation,
                config=self.config,
                client=client,
                bind_host=self.bind_host,
            )
        )


def worker_factory(config: ServeConfig, worker: WorkerConfig) -> RayWorkerFactory:
    """The factory for this deployment's workers."""
    embedded = config.ray_address is None
    return RayWorkerFactory(
        config=worker,
        num_cpus=config.worker_cpus,
        num_gpus=config.worker_gpus,
        bind_host="127.0.0.1" if embedded else "",
        variables=worker_variables(threads=config.threads, embedded=embedded),
        strategy="DEFAULT" if config.worker_gpus else "SPREAD",
    )


def check_resources(config: ServeConfig) -> None:
    """Raises `ValueError` with both sides if the cluster as a whole is too small; what is busy now may free up."""
    import ray

    total = ray.cluster_resources()
    for name, each in (("GPU", config.worker_gpus), ("CPU", config.worker_cpus)):
        count = config.workers + config.spares
        needed, there = each * count, total.get(name, 0.0)
        if needed > there:
            raise ValueError(
                f"{count} workers of {each:g} {name} each need {needed:g} {name}, the cluster has {there:g}"
            )


def find_controller(deployment: str, address: str) -> Any:
    """The controller of a deployment that runs. `StartupError` if there is none of this name."""
    import ray

    try:
        return ray.get_actor(ACTOR_NAME, namespace=namespace(deployment))
    except ValueError:
        raise StartupError(
            f"no deployment {deployment!r} runs in the cluster at {address}: "
            "name another --deployment, or start it without --attach"
        ) from None


def create_controller(config: ControllerConfig, factory: WorkerFactory) -> Any:
    """The deployment's controller, on this node. `StartupError` if the cluster already has one of this name.

    Ray starts it again if its process dies, and sends it the calls that it has not answered.
    """
    import ray

    from moeray.deploy.actors import ControllerActor

    # Not by node affinity: if it is soft, Ray does not heed it for an actor that takes no resources.
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    try:
        return (
            ray.remote(ControllerActor)
            .options(
                name=ACTOR_NAME,
                namespace=namespace(config.deployment),
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=-1,
                num_cpus=0,
                max_concurrency=1000,
                label_selector=here,
                fallback_strategy=[{"label_selector": {}}],
            )
            .remote(config, factory)
        )
    except ValueError as error:
        raise StartupError(
            f"deployment {config.deployment!r} already runs in this cluster: end it, or choose another --deployment"
        ) from error
