"""What a controller is told at start, and the names it goes by. No Ray here."""

from dataclasses import dataclass, field

from moeray.elastic.phases import OperationDeadlines
from moeray.elastic.planner import fewest_workers
from moeray.elastic.scaling import ScaleLimits
from moeray.elastic.startup import StartDeadlines

ACTOR_NAME = "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """What a deployment shall be. `num_layers` and `num_experts` are the checkpoint's MoE layers and experts, and
    `num_seats` is how many experts a worker has room for, per layer.

    `min_workers` None is the fewest whose seats hold all experts. `num_spares` workers wait beside the group, as far as
    there are free slots; one that fails is replaced after `spare_retry_s`. `history_limit` operations are remembered.
    Without a reader of its view for `orphan_timeout_s`, the controller ends its workers and itself. With `replace`,
    workers that were lost are replaced as soon as the others serve again. A worker for which the others have waited
    for `stall_timeout_s` is given up.
    """

    deployment: str
    num_workers: int
    num_layers: int
    num_experts: int
    num_seats: int
    max_workers: int
    min_workers: int | None = None
    num_spares: int = 0
    deadlines: StartDeadlines = field(default_factory=StartDeadlines)
    operation_deadlines: OperationDeadlines = field(default_factory=OperationDeadlines)
    history_limit: int = 100
    spare_retry_s: float = 5.0
    stop_timeout_s: float = 5.0
    orphan_timeout_s: float = 60.0
    replace: bool = True
    stall_timeout_s: float = 1.5

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers <= self.max_workers:
            raise ValueError(f"num_workers is {self.num_workers}, must be from 1 to {self.max_workers}")
        fewest = fewest_workers(self.num_experts, self.num_seats)
        if self.min_workers is not None and not fewest <= self.min_workers <= self.num_workers:
            raise ValueError(
                f"min_workers is {self.min_workers}, must be from {fewest} (for {self.num_experts} experts in "
                f"{self.num_seats} seats a worker) to num_workers ({self.num_workers})"
            )
        if not 0 <= self.num_spares <= self.max_workers:
            raise ValueError(f"num_spares is {self.num_spares}, must be from 0 to {self.max_workers}")
        if self.history_limit < 1:
            raise ValueError(f"history_limit is {self.history_limit}, must be at least 1")
        for name, value in (
            ("spare_retry_s", self.spare_retry_s),
            ("stop_timeout_s", self.stop_timeout_s),
            ("orphan_timeout_s", self.orphan_timeout_s),
            ("stall_timeout_s", self.stall_timeout_s),
        ):
            if not value > 0:
                raise ValueError(f"{name} is {value}, must be more than 0")

    @property
    def limits(self) -> ScaleLimits:
        """How small and how large the group may become."""
        fewest = fewest_workers(self.num_experts, self.num_seats)
        return ScaleLimits(min_workers=self.min_workers or fewest, max_workers=self.max_workers)


def worker_name(slot: int, incarnation: int) -> str:
    """The name of a worker's actor, by which a restarted controller finds it."""
    return f"worker-{slot}.{incarnation}"


def namespace(deployment: str) -> str:
    """The Ray namespace that a deployment's actors live in."""
    return f"moeray-{deployment}"
