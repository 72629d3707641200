"""Following the controller: take the lease once, then hear of every change of the cluster, for as long as it takes."""

import asyncio
import logging
from collections.abc import Callable

from moeray.api.control import ControlClient
from moeray.comm.errors import MoerayError
from moeray.elastic.view import Attachment, ClusterView

logger = logging.getLogger(__name__)

RETRY_S = 1.0
ATTACH_S = 30.0
POLL_SLACK_S = 10.0


class ControllerWatch:
    """`on_attached` is called once, `on_view` with every new view, both on the event loop."""

    def __init__(
        self,
        control: ControlClient,
        *,
        poll_s: float,
        on_attached: Callable[[Attachment], None],
        on_view: Callable[[ClusterView], None],
    ) -> None:
        self._control = control
        self._poll_s = poll_s
        self._on_attached = on_attached
        self._on_view = on_view
        self._is_attached = False
        self._version = -1

    async def run(self) -> None:
        """Until cancelled; a controller that does not answer is asked again, also while it is started anew."""
        while True:
            try:
                await self._follow()
            except (MoerayError, TimeoutError) as error:
                logger.warning("the controller did not answer, asking again: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        if not self._is_attached:
            async with asyncio.timeout(ATTACH_S):
                attachment = await self._control.attach()
            self._is_attached = True
            self._on_attached(attachment)
        while True:
            async with asyncio.timeout(self._poll_s + POLL_SLACK_S):
                view = await self._control.view(self._version, self._poll_s)
            if view.version != self._version:
                self._version = view.version
                self._on_view(view)
