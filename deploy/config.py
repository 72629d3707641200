"""What `moeray serve` was asked for: one frozen value, checked before anything starts."""

import dataclasses
import ipaddress
import math
import os
from dataclasses import dataclass

from moeray.api.settings import ServerSettings
from moeray.elastic.controller_config import ControllerConfig
from moeray.elastic.startup import StartDeadlines
from moeray.worker.config import WorkerConfig

DEMO = "demo"
# What a deployment that runs already has decided: no matter of a further front end.
DEPLOYMENT_FIELDS = (
    "spares",
    "device",
    "dtype",
    "weights",
    "combine",
    "dispatcher",
    "model_impl",
    "max_model_len",
    "max_num_batched_tokens",
    "kv_cache_gib",
    "prefix_caching",
    "threads",
    "cpus_per_worker",
    "gpus_per_worker",
    "start_timeout_s",
    "orphan_timeout_s",
    "stall_timeout_s",
    "replace",
)


def num_usable_cpus() -> int:
    """The CPUs on which processes of this machine may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# An exchange may hang although both of its sockets are dead; it ends by itself after so many stall time-outs.
GROUP_TIMEOUTS = 3.0
# Workers are asked how far they are every 0.2 s, and may be busy.
LEAST_STALL_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The options of `moeray serve`, under the names of the command line.

    `max_workers` None is the larger of twice the workers and 4. `min_workers` None is 1 on a CPU and one below the
    workers on CUDA; each worker reserves room for the experts that it would hold with so few. `spares` workers wait
    beside the others with their weights loaded. `ray_address` None starts an embedded Ray. `cpus_per_worker` and
    `gpus_per_worker` None: nothing of an embedded Ray's CPUs, a hundredth of a CPU in a cluster, one GPU for CUDA.
    While nothing serves, requests wait `recovery_timeout_s`. A worker for which the others have waited
    `stall_timeout_s` is given up. With `replace`, lost workers are replaced. `attach` starts only a front end, for the
    deployment of this name that runs in the cluster.
    """

    model: str
    workers: int = 1
    max_workers: int | None = None
    min_workers: int | None = None
    spares: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_key: str | None = None
    served_model_name: str | None = None
    generation_config: str = "auto"
    deployment: str = "default"
    ray_address: str | None = None
    attach: bool = False
    device: str = "cpu"
    dtype: str = "auto"
    weights: str = "auto"
    combine: str = "auto"
    dispatcher: str = "auto"
    model_impl: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    kv_cache_gib: float | None = None
    prefix_caching: bool = True
    max_queue: int = 1024
    threads: int = 1
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    start_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    orphan_timeout_s: float = 60.0
    recovery_timeout_s: float = 30.0
    stall_timeout_s: float = 1.5
    replace: bool = True

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError(f"model is {self.model!r}, must be {DEMO}, a directory or a hub name (owner/name)")
        if self.served_model_name == "":
            raise ValueError("served_model_name is '', must have at least one character")
        if not self.host:
            raise ValueError("host is '', must be an address to listen on")
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}, must be at least 1")
        if self.max_workers is not None and self.max_workers < self.workers:
            raise ValueError(f"max_workers is {self.max_workers}, must be at least workers ({self.workers})")
        if self.min_workers is not None and not 1 <= self.min_workers <= self.workers:
            raise ValueError(f"min_workers is {self.min_workers}, must be from 1 to workers ({self.workers})")
        if not 0 <= self.spares <= self.most_workers:
            raise ValueError(f"spares is {self.spares}, must be from 0 to max_workers ({self.most_workers})")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, must be from 0 to 65535")
        if not self.deployment.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"deployment is {self.deployment!r}, must be letters, digits, '-' and '_'")
        if self.attach:
            self._check_attach()
        if self.ray_address is None:
            self._check_embedded()
        elif self.ray_address != "auto":
            host, _, port = self.ray_address.rpartition(":")
            if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
                raise ValueError(f"ray_address is {self.ray_address!r}, must be host:port or auto")
        if self.beyond_loopback and self.admin_key is None:
            raise ValueError(f"host is {self.host!r}, beyond loopback: admin_key must be given, it guards control")
        for name, number in (
            ("kv_cache_gib", self.kv_cache_gib),
            ("start_timeout_s", self.start_timeout_s),
            ("orphan_timeout_s", self.orphan_timeout_s),
            ("recovery_timeout_s", self.recovery_timeout_s),
        ):
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"{name} is {number}, must be more than 0 and finite")
        if self.kv_cache_gib is not None and self.kv_cache_gib * (1 << 30) < 1:
            raise ValueError(f"kv_cache_gib is {self.kv_cache_gib}, must be at least a byte")
        if not LEAST_STALL_TIMEOUT_S <= self.stall_timeout_s < math.inf:
            limit = f"at least {LEAST_STALL_TIMEOUT_S:g} and finite"
            raise ValueError(f"stall_timeout_s is {self.stall_timeout_s}, must be {limit}")
        for name, number in (
            ("drain_timeout_s", self.drain_timeout_s),
            ("cpus_per_worker", self.cpus_per_worker),
            ("gpus_per_worker", self.gpus_per_worker),
        ):
            if number is not None and not 0 <= number < math.inf:
                raise ValueError(f"{name} is {number}, must be at least 0 and finite")

    def _check_embedded(self) -> None:
        """What an embedded Ray cannot give: it is on this machine alone, and counts no CPUs."""
        if self.threads > (limit := num_usable_cpus()):
            raise ValueError(f"threads is {self.threads}, must be at most {limit}, the CPUs of this machine")
        if self.cpus_per_worker:
            raise ValueError(
                f"cpus_per_worker is {self.cpus_per_worker:g}, is for a cluster only (ray_address): "
                "the embedded Ray counts no CPUs, threads is how many a worker uses"
            )

    def _check_attach(self) -> None:
        """What a front end alone needs, and what is none of its business."""
        if self.ray_address is None:
            raise ValueError("ray_address is not given, --attach needs it: the deployment runs in that cluster")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in DEPLOYMENT_FIELDS and value != field.default:
                raise ValueError(
                    f"{field.name} is {value}, must be left out with --attach: the deployment runs already"
                )

    @property
    def beyond_loopback(self) -> bool:
        """Whether other hosts can reach the HTTP port."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def most_workers(self) -> int:
        return self.max_workers if self.max_workers is not None else max(2 * self.workers, 4)

    @property
    def fewest_workers(self) -> int:
        if self.min_workers is not None:
            return self.min_workers
        return 1 if self.device == "cpu" else max(1, self.workers - 1)

    @property
    def worker_cpus(self) -> float:
        if self.cpus_per_worker is not None:
            return self.cpus_per_worker
        return 0.0 if self.ray_address is None else 0.01

    @property
    def worker_gpus(self) -> float:
        if self.gpus_per_worker is not None:
            return self.gpus_per_worker
        return 1.0 if self.device == "cuda" else 0.0

    def worker_config(self, *, model_path: str, num_experts: int) -> WorkerConfig:
        """What each worker is told; `ValueError` names the option that is out of range."""
        return WorkerConfig(
            model_path=model_path,
            num_seats=-(-num_experts // self.fewest_workers),
            max_workers=self.most_workers,
            device=self.device,
            dtype=self.dtype,
            weights=self.weights,
            combine=self.combine,
            dispatcher=self.dispatcher,
            model_impl=self.model_impl,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(self.max_num_batched_tokens, self.max_num_seqs),
            max_queue=self.max_queue,
            prefix_caching=self.prefix_caching,
            kv_cache_bytes=None if self.kv_cache_gib is None else int(self.kv_cache_gib * (1 << 30)),
            num_threads=self.threads,
            group_timeout_s=GROUP_TIMEOUTS * self.stall_timeout_s,
            orphan_timeout_s=self.orphan_timeout_s,
        )

    def controller_config(self, worker: WorkerConfig, *, num_layers: int, num_experts: int) -> ControllerConfig:
        """What the controller is told; `ValueError` as above."""
        return ControllerConfig(
            deployment=self.deployment,
            num_workers=self.workers,
            num_layers=num_layers,
            num_experts=num_experts,
            num_seats=worker.num_seats,
            max_workers=worker.max_workers,
            min_workers=self.fewest_workers,
            num_spares=self.spares,
            deadlines=StartDeadlines(
                create_s=min(self.start_timeout_s, 180.0),
                load_s=self.start_timeout_s,
                join_s=worker.group_timeout_s + 30.0,
            ),
            orphan_timeout_s=self.orphan_timeout_s,
            replace=self.replace,
            stall_timeout_s=self.stall_timeout_s,
        )

    def server_settings(self, *, model_path: str) -> ServerSettings:
        """What the front end is told; `ValueError` as above."""
        return ServerSettings(
            model_path=model_path,
            served_name=self.served_name,
            generation_config=self.generation_config,
            api_key=self.api_key,
            admin_key=self.admin_key,
            min_workers=self.fewest_workers,
            max_workers=self.most_workers,
            max_queue=self.max_queue,
            max_inflight_per_worker=self.max_num_seqs,
            recovery_timeout_s=self.recovery_timeout_s,
        )
