"""What the terminal shows while a deployment starts: bars on a terminal, one line per milestone elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from moeray.elastic.view import ClusterView

RAY, GROUP, FRONT_END = "Ray", "group", "front end"


class StartProgress:
    """Steps by name; each begins when it is first mentioned and ends once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._done: set[str] = set()
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            transient=False,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bars as they are; what is printed from now on comes below them."""
        self._bars.stop()

    def begin(self, name: str, note: str = "") -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=None, note=note)

    def advance(self, name: str, fraction: float, note: str = "") -> None:
        """Show how far a step is, 0 to 1."""
        self.begin(name)
        self._bars.update(self._tasks[name], total=1.0, completed=fraction, note=note)

    def done(self, name: str, note: str = "") -> None:
        if name in self._done:
            return
        self.advance(name, 1.0, note)
        self._done.add(name)
        if not self._console.is_terminal:
            line = f"{name}: ready after {time.monotonic() - self._began:.1f} s {note}".rstrip()
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def on_view(self, view: ClusterView) -> None:
        """Show each worker's loading, and the group once all are loaded."""
        for member in view.members:
            name = f"worker {member.slot}"
            if member.state == "loading":
                self.advance(name, 0.99 * member.loaded_fraction, "loading weights")
            elif member.state in ("joining", "serving", "spare"):
                self.done(name, f"{member.num_experts} experts, pid {member.pid}")
            else:
                self.begin(name, member.state)
        if view.model is not None:
            self.begin(GROUP, "connecting")
            if view.state == "serving":
                self.done(GROUP, f"{view.model.dispatcher}; {view.model.dtype}, weights {view.model.weights}")
