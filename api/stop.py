"""Stop strings: found wherever they lie across token boundaries, with as little text held back as possible."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete; what may be the beginning of one waits.

    The match that is complete first wins, and of two that are complete at the same character the longer one,
    so the outcome does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Text that is safe to send now; after a match `matched` is set and the rest is dropped.

        While not `armed` (fewer than min_tokens tokens), stop strings that are completed by `text` do not
        count.
        """
        if not self._stops:
            return text
        num_held = len(self._held)
        text = self._held + text
        if armed and (match := self._first_match(text, num_held)) is not None:
            start, self.matched = match
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        keep = self._num_to_hold(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back; nothing more will come."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str, num_held: int) -> tuple[int, str] | None:
        """Start and stop string of the match with the earliest end, among those that end in the new text."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_held - len(stop) + 1))
            if start >= 0:
                best = min(best or (len(text) + 1, 0, ""), (start + len(stop), start, stop))
        return None if best is None else (best[1], best[2])

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
