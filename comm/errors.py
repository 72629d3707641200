"""Every failure of a run that moeray raises by name.

    MoerayError
    ├── StartupError         a process could not be brought up (which one, and why)
    ├── CheckpointError      a checkpoint is missing, incomplete, or asks for mathematics that is not implemented
    ├── CapacityError        something does not fit: seats, buffers, blocks, memory
    ├── BackendUnavailable   an explicitly chosen backend cannot work here
    ├── GroupError           a group of ranks failed; names the slots that did not answer
    │   └── GroupTimeout     ... within the deadline
    ├── WorkerDied           a worker's process ended, or cannot be reached any more
    ├── EpochMismatch        ranks met with different epochs or steps
    ├── OperationRefused     another operation runs; names it
    └── ControlTimeout       the controller or a worker did not answer a command in time

The caller's own mistakes (a field out of range) are `ValueError`, raised where the value enters.
"""

from collections.abc import Sequence


class MoerayError(Exception):
    """Root of the tree."""


class StartupError(MoerayError):
    """A process of the deployment could not be brought up."""


class CheckpointError(MoerayError):
    """A checkpoint cannot be served as it is; the message names the file, tensor or field."""


class CapacityError(MoerayError):
    """Something does not fit into what was reserved; the message names the limit."""


class BackendUnavailable(MoerayError):
    """An explicitly chosen backend cannot work here; the message says why."""


class GroupError(MoerayError):
    """A collective of the current epoch's group failed.

    `slots` are those that the failure points at, as evidence; who is dead is the controller's decision.
    """

    def __init__(self, message: str, *, slots: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.slots = tuple(slots)


class GroupTimeout(GroupError):
    """A collective did not complete within its deadline."""


class WorkerDied(MoerayError):
    """A worker's process ended, or cannot be reached any more; the message says how in one line."""


class EpochMismatch(MoerayError):
    """Ranks met in a header exchange with different epochs or steps."""


class OperationRefused(MoerayError):
    """One operation at a time: `operation_id` is the one that runs."""

    def __init__(self, message: str, *, operation_id: str = "") -> None:
        super().__init__(message)
        self.operation_id = operation_id


class ControlTimeout(MoerayError):
    """A command to the controller or a worker was not answered within its deadline."""
