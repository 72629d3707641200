"""What the front end needs from the controller. `deploy/` injects an implementation over Ray; this folder
knows no Ray.
"""

from typing import Protocol

from moeray.elastic.view import Attachment, ClusterView, FaultView, OperationView, RebalanceRequest, ScaleRequest


class ControlClient(Protocol):
    """An asynchronous way to the controller; every call but `ping` ends within its deadline or raises
    `MoerayError`.
    """

    async def ping(self) -> None:
        """Returns when the controller answers, which costs it nothing, however long that takes; `MoerayError` if it
        cannot be reached.
        """

    async def end_hung(self) -> str | None:
        """End the controller's process, which lives and does not answer; it is started anew.

        Returns which one that was, None if it is not known to live.
        """

    async def attach(self) -> Attachment:
        """Take the lease of the deployment: the newest one wins, workers drop messages of older ones."""

    async def view(self, after_version: int, timeout_s: float) -> ClusterView:
        """Long poll: at once if a version newer than `after_version` exists, else at the next change.

        After `timeout_s` without a change the current view comes, with its old version.
        """

    async def scale(self, request: ScaleRequest) -> OperationView:
        """Start an operation and return at once; a repeated `operation_id` gets the first one's operation.

        Raises `ValueError` with the limits for what cannot be done, and `OperationRefused` with the id of the
        operation that runs.
        """

    async def rebalance(self, request: RebalanceRequest) -> OperationView:
        """As `scale`; raises `MoerayError` too if a worker does not tell its load."""

    async def operations(self) -> tuple[OperationView, ...]:
        """All that are remembered, the oldest first."""

    async def operation(self, operation_id: str) -> OperationView | None:
        """One of them, None if it is not known."""

    async def wait_operation(self, operation_id: str, timeout_s: float) -> OperationView:
        """Long poll: the operation once it is over, after `timeout_s` as it stands. `ValueError` if it is not known."""

    async def faults(self) -> tuple[FaultView, ...]:
        """What went wrong with members of the group, the oldest first."""
