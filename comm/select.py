"""Which dispatcher serves a group: decided from sizes, said in words, and never replaced silently.

Legend: W workers, K experts per token.
"""

from dataclasses import dataclass

from moeray.comm.errors import BackendUnavailable

DISPATCHERS = ("loopback", "all_gather", "all_to_all")
DENSE_FRACTION = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSizes:
    """What the choice goes by; `backend` is the transport of rows: none, gloo or nccl."""

    num_workers: int
    top_k: int
    hidden_size: int
    combine: str
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A dispatcher's name and why."""

    name: str
    reason: str


def expected_remote_rows(num_workers: int, top_k: int) -> float:
    """Distinct remote workers that a token's row goes to, if its experts are spread evenly."""
    others = num_workers - 1
    return others * (1.0 - (1.0 - 1.0 / num_workers) ** top_k)


def choose_dispatcher(requested: str, sizes: DispatchSizes) -> Choice:
    """Take the request if it can work, else (`auto`) choose.

    Raises `BackendUnavailable` for a dispatcher that cannot work with these sizes, `ValueError` for an unknown name.
    """
    if requested not in ("auto", *DISPATCHERS):
        raise ValueError(f"dispatcher is {requested!r}, must be one of auto, {', '.join(DISPATCHERS)}")
    if requested == "auto":
        return _choose(sizes)
    possible, reason = can_serve(requested, sizes)
    if not possible:
        raise BackendUnavailable(f"dispatcher {requested} cannot work: {reason}")
    return Choice(name=requested, reason=f"asked for; {reason}")


def can_serve(name: str, sizes: DispatchSizes) -> tuple[bool, str]:
    """Whether a dispatcher works with these sizes, and why."""
    workers = sizes.num_workers
    if name == "loopback":
        return workers == 1, f"it moves no row, the group has {workers} worker{'s' if workers > 1 else ''}"
    return workers > 1, f"it moves rows between workers, the group has {workers}"


def _choose(sizes: DispatchSizes) -> Choice:
    workers, top_k = sizes.num_workers, sizes.top_k
    if workers == 1:
        return Choice(name="loopback", reason="one worker, no row moves")
    remote = expected_remote_rows(workers, top_k)
    spread = (
        f"K={top_k} experts on W={workers} workers send a row of D={sizes.hidden_size} "
        f"to {remote:.2f} of {workers - 1} others"
    )
    if sizes.backend == "gloo":
        return Choice(name="all_to_all", reason=f"{spread}; gloo's all-gather is slower than its all-to-all")
    if sizes.combine == "fast" and top_k >= workers and remote >= DENSE_FRACTION * (workers - 1):
        return Choice(name="all_gather", reason=f"{spread}: nearly all, and no counts need to travel")
    return Choice(name="all_to_all", reason=spread)
