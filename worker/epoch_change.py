"""What stands between this epoch and the next: a commit that waits for its step, or a group that was given up."""

from concurrent.futures import Future

from moeray.comm.errors import GroupError
from moeray.worker.commands import CommitEpoch, Halt

NOT_READY = -1
GIVEN_UP = "the controller gave the group up"


class EpochChange:
    """Belongs to the engine's thread; only `is_halted` may be read by others.

    While the engine is halted it enters no epoch before the controller has said which ones are void.
    """

    def __init__(self, joined: "Future[int] | None") -> None:
        """`joined` waits for the first header of the epoch that begins."""
        self.next: CommitEpoch | None = None
        self.halt: Halt | None = None
        self.is_halted = False
        self._switching = joined
        self._may_enter = False
        self._void_before = 0

    @property
    def ready_epoch(self) -> int:
        """What the step header says."""
        return NOT_READY if self.next is None else self.next.epoch

    def on_commit(self, commit: CommitEpoch) -> bool:
        """Whether it counts; one that does not is answered."""
        is_void = commit.epoch < self._void_before
        if is_void or (self.is_halted and (not self._may_enter or commit.prepared is None)):
            commit.done.set_exception(GroupError(f"epoch {commit.epoch} was given up"))
            return False
        self.next = commit
        return True

    def on_halt(self, halt: Halt, epoch: int) -> None:
        """The controller gives the group of this epoch up: at once if it is left already, else before the next step."""
        self._void_before = max(self._void_before, halt.epoch)
        self.halt = halt
        if self.is_halted:
            self._answer(epoch)

    def begin_halted(self, epoch: int, reason: str) -> None:
        """The group of this epoch is left, and so is every switch that was under way."""
        self.let_go(reason)
        self.is_halted, self._may_enter = True, False
        if self.halt is not None:
            self._answer(epoch)

    def _answer(self, epoch: int) -> None:
        assert self.halt is not None
        self.let_go(GIVEN_UP)
        self._may_enter = True
        self.halt.done.set_result(epoch)
        self.halt = None

    def take(self) -> CommitEpoch:
        """The next epoch begins now; `met` has yet to come."""
        commit = self.next
        assert commit is not None
        self.next, self.is_halted = None, False
        if commit.prepared is not None:
            self._switching = commit.done
        return commit

    def met(self, epoch: int) -> None:
        """The headers of all members came round."""
        if self._switching is not None:
            self._switching.set_result(epoch)
            self._switching = None

    def let_go(self, reason: str) -> None:
        """No switch will come of what was asked for."""
        for waiting in (self._switching, self.next.done if self.next else None):
            if waiting is not None and not waiting.done():
                waiting.set_exception(GroupError(reason))
        self._switching = self.next = None
