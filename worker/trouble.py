"""Where an engine leaves word of what went wrong, and where other threads wait for it."""

import threading

from moeray.comm.messages import Trouble


class TroubleBox:
    """Keeps the newest trouble; the one that ended the engine stays for good."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: Trouble | None = None

    def put(self, trouble: Trouble) -> None:
        """Tell all who wait."""
        with self._changed:
            if self._newest is None or not self._newest.is_fatal:
                self._newest = trouble
                self._changed.notify_all()

    def wait(self, seen_epoch: int, timeout_s: float) -> Trouble | None:
        """The newest trouble if it is fatal or of an epoch after `seen_epoch`; None after `timeout_s` without any."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_news(seen_epoch), timeout_s)
            return self._newest if self._is_news(seen_epoch) else None

    def _is_news(self, seen_epoch: int) -> bool:
        newest = self._newest
        return newest is not None and (newest.is_fatal or newest.epoch > seen_epoch)
