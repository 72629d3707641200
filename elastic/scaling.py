"""From a wish for another size to slots: who stays, who leaves, how many join. Pure; every limit is in the error."""

from dataclasses import dataclass

from moeray.elastic.view import RebalanceRequest, ScaleRequest

MAX_OPERATION_ID = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLimits:
    """How many workers a deployment may have: its seats and buffers are made for that."""

    min_workers: int
    max_workers: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(f"min_workers is {self.min_workers}, must be from 1 to max_workers ({self.max_workers})")

    def check(self, num_workers: int, what: str) -> None:
        """Raises `ValueError`; `what` is the field and its value in words."""
        if not self.min_workers <= num_workers <= self.max_workers:
            raise ValueError(
                f"{what}, must be from {self.min_workers} to {self.max_workers} workers "
                "(min_workers and max_workers of this deployment)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """Slots that stay and leave, in ascending order, and how many join."""

    stayers: tuple[int, ...]
    leavers: tuple[int, ...]
    num_joiners: int

    @property
    def changes_nothing(self) -> bool:
        return not self.leavers and not self.num_joiners


def check_types(request: ScaleRequest) -> None:
    """Raises `ValueError` for values that a caller without a schema could send."""
    check_operation(request)
    if request.workers is not None and type(request.workers) is not int:
        raise ValueError(f"workers is {request.workers!r}, must be an integer")
    if any(type(slot) is not int for slot in request.retire):
        raise ValueError(f"retire is {list(request.retire)}, must be integers")


def check_operation(request: ScaleRequest | RebalanceRequest) -> None:
    """The same for what every operation has: its id and its deadline."""
    if request.operation_id is not None and not 1 <= len(request.operation_id) <= MAX_OPERATION_ID:
        raise ValueError(
            f"operation_id has {len(request.operation_id)} characters, must have from 1 to {MAX_OPERATION_ID}"
        )
    deadline_s = request.deadline_s
    if deadline_s is not None and not 0 < deadline_s < float("inf"):
        raise ValueError(f"deadline_s is {deadline_s}, must be more than 0")


def plan_scale(request: ScaleRequest, serving: tuple[int, ...], limits: ScaleLimits) -> ScalePlan:
    """Who stays, leaves and joins. Without names the highest slots leave. Raises `ValueError` with the limits."""
    retire = set(request.retire)
    if request.workers is None and not retire:
        raise ValueError("workers or retire must be given")
    if len(retire) != len(request.retire):
        raise ValueError(f"retire is {list(request.retire)}, must name each slot once")
    if unknown := sorted(retire - set(serving)):
        raise ValueError(f"retire names slot {unknown[0]}, must be of the serving slots {sorted(serving)}")
    remaining = sorted(set(serving) - retire)
    if request.workers is None:
        limits.check(len(remaining), f"retire is {list(request.retire)}, which leaves {len(remaining)}")
        return ScalePlan(stayers=tuple(remaining), leavers=tuple(sorted(retire)), num_joiners=0)
    limits.check(request.workers, f"workers is {request.workers}")
    stayers = tuple(remaining[: request.workers])
    if not stayers:
        raise ValueError(f"retire is {list(request.retire)}, must leave one of the serving slots {sorted(serving)}")
    joining = request.workers - len(stayers)
    if len(serving) + joining > limits.max_workers:
        raise ValueError(
            f"workers is {request.workers} and retire is {list(request.retire)}: {joining} would join the "
            f"{len(serving)} that serve before any leaves, must be at most {limits.max_workers} at a time (max_workers)"
        )
    return ScalePlan(stayers=stayers, leavers=tuple(sorted(set(serving) - set(stayers))), num_joiners=joining)
