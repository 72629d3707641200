"""What the terminal shows while a deployment serves: workers that are lost, and whether it serves."""

from rich.console import Console

from moeray.elastic.view import ClusterView


class News:
    """A line for each change that a person should know of, and none for all others."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._dead: set[tuple[int, int]] = set()
        self._has_stopped = False

    def on_view(self, view: ClusterView) -> None:
        """A new view of a deployment that has served."""
        dead = {(member.slot, member.incarnation) for member in view.members if member.state == "dead"}
        for slot, _ in sorted(dead - self._dead):
            self._tell(f"Worker {slot} is dead.")
        self._dead = dead
        has_stopped = view.state == "recovering"
        if has_stopped and not self._has_stopped:
            self._tell(f"Nothing serves: {view.cause}.")
        if self._has_stopped and view.state == "serving":
            self._tell(f"It serves again, as epoch {view.epoch}.")
        self._has_stopped = has_stopped

    def _tell(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)
