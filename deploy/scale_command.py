"""What `moeray scale` and `moeray rebalance` do: ask a running server for a change, and show how it gets there."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.console import Console, Group
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from moeray.deploy.client import ServerError, bearer, connect
from moeray.elastic.view import PHASES, OperationView

POLL_S = 0.1
# An operation's own deadline counts until the switch; then leavers end.
AFTER_SWITCH_S = 120.0
MIB = 1 << 20

Operation = Mapping[str, Any]
OPERATION_FIELDS = tuple(field.name for field in msgspec.structs.fields(OperationView))


def check_both(workers: int, retire: Sequence[int], topology: Mapping[str, Any]) -> None:
    """A size beside slots to retire must be the size that is left. Raises `ServerError`."""
    serving = [member["slot"] for member in topology["members"] if member["rank"] is not None]
    left = len(set(serving) - set(retire))
    if workers != left:
        raise ServerError(
            f"N is {workers}, but retiring {sorted(retire)} of the serving slots {serving} leaves {left}: "
            "give that, or leave one of the two out"
        )


def start(
    url: str, *, workers: int | None, retire: Sequence[int], deadline_s: float | None, admin_key: str | None
) -> Operation:
    """Begin an operation. Raises `ServerError` with the server's reason if it is refused.

    `ValueError` names the option if nothing is asked for, or what is asked cannot be sent.
    """
    if workers is None and not retire:
        raise ValueError("neither N nor --retire is given: say how many workers shall serve, or which slot leaves")
    body: dict[str, Any] = {"workers": workers, "retire": list(retire) or None, "deadline_s": deadline_s}
    with connect(url, bearer("admin_key", admin_key)) as server:
        if workers is not None and retire:
            check_both(workers, retire, server.get("/topology", "members"))
            body["workers"] = None
        given = {name: value for name, value in body.items() if value is not None}
        return server.post("/scale", given, *OPERATION_FIELDS)


def start_rebalance(url: str, *, deadline_s: float | None, admin_key: str | None) -> Operation:
    """As `start`, for an exchange of experts between the workers."""
    with connect(url, bearer("admin_key", admin_key)) as server:
        given = {} if deadline_s is None else {"deadline_s": deadline_s}
        return server.post("/rebalance", given, *OPERATION_FIELDS)


def follow(url: str, operation: Operation, show: Callable[[Operation], None], *, admin_key: str | None) -> Operation:
    """Show the operation until it is over, and return it. Raises `ServerError`, also if it does not end in time."""
    path = f"/operations/{operation['operation_id']}"
    deadline = time.monotonic() + operation["deadline_s"] + AFTER_SWITCH_S
    with connect(url, bearer("admin_key", admin_key)) as server:
        while True:
            show(operation)
            if operation["outcome"] is not None:
                return operation
            if time.monotonic() > deadline:
                raise ServerError(f"operation {operation['operation_id']} is still {operation['phase']}: {url}{path}")
            time.sleep(POLL_S)
            operation = server.get(path, *OPERATION_FIELDS)


class ScaleProgress:
    """One line per phase that was reached: with a running clock on a terminal, once it is reached elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<14}"),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, operation: Operation) -> None:
        """Bring the lines up to date."""
        for phase in operation["phases"]:
            name, seconds = phase["name"], phase["seconds"]
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=1, note="")
                if not self._console.is_terminal:
                    self._console.print(f"{name} ...", markup=False, highlight=False)
            passed = time.time() - phase["started_at"] if seconds is None else seconds
            is_over = seconds is not None or operation["outcome"] is not None
            note = f"{max(0.0, passed):.2f} s" if seconds is not None or not is_over else ""
            self._bars.update(self._tasks[name], completed=int(is_over), note=note)


def summary(operation: Operation) -> Group:
    """Phases with their seconds, and what was moved."""
    num_after = len(operation["targets"])
    num_before = num_after - len(operation["joiners"]) + len(operation["leavers"])
    change = f"rebalance of {num_after}" if operation["kind"] == "rebalance" else f"{num_before} → {num_after}"
    reached = {phase["name"]: phase["seconds"] for phase in operation["phases"]}
    table = Table("phase", Column("seconds", justify="right"))
    for name in PHASES:
        if name in reached:
            table.add_row(name, "" if reached[name] is None else f"{reached[name]:.3f}")
    total = sum(seconds for seconds in reached.values() if seconds is not None)
    table.add_row("together", f"{total:.3f}", style="bold")
    heading = f"{change} workers: {operation['outcome']}"
    if operation["outcome"] == "done":
        epochs = f"epoch {operation['from_epoch']} → {operation['to_epoch']}"
    else:
        epochs = f"epoch {operation['from_epoch']} serves on"
    moved = (
        f"{operation['moved_experts']} experts to move, {operation['moved_bytes'] / MIB:.1f} MiB read, "
        f"{operation['kv_blocks']} KV blocks copied"
    )
    return Group(Text(heading, style="bold"), table, Text(f"{epochs}; {moved}"))
