"""What the front end needs from the controller. `deploy/` injects an implementation over Ray; this folder
knows no Ray.
"""

from typing import Protocol

from moeray.elastic.view import Attachment, ClusterView


class ControlClient(Protocol):
    """An asynchronous way to the controller; every call ends within its deadline or raises `MoerayError`."""

    async def attach(self) -> Attachment:
        """Take the lease of the deployment: the newest one wins, workers drop messages of older ones."""

    async def view(self, after_version: int, timeout_s: float) -> ClusterView:
        """Long poll: at once if a version newer than `after_version` exists, else at the next change.

        After `timeout_s` without a change the current view comes, with its old version.
        """
