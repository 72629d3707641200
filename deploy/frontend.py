"""The front end's process: `python -m moeray.deploy.frontend FD`, started by the supervisor and nobody else.

FD is the listening socket. One line of JSON on standard input brings the settings; when standard input ends the
supervisor is gone, and so is this process. It writes `ready` on standard output when it takes requests.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from moeray.api.front_end import FrontEnd
from moeray.api.server import create_app
from moeray.api.settings import ServerSettings
from moeray.comm.errors import MoerayError
from moeray.deploy.front_end_process import READY, SUPERSEDED

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CLOSE_TIMEOUT_S = 2
READY_POLL_S = 0.02


class Server(uvicorn.Server):
    """uvicorn, told to end by us: its own handlers would close the port before running streams have ended."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._end = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Renew the date header once a second and wait; uvicorn's own loop wakes ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), 1.0)

    def end(self) -> None:
        """Leave the main loop now."""
        self.should_exit = True
        self._end.set()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    listener = socket.socket(fileno=int(sys.argv[1]))
    line = _read_line()
    if not line.endswith(b"\n"):
        return  # the supervisor gave up before it had settings for us
    message = json.loads(line)
    os.environ.update(message["environment"])
    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            superseded = runner.run(_serve(message, listener))
    except MoerayError as error:
        sys.exit(str(error))
    if superseded:
        sys.exit(SUPERSEDED)


def _read_line() -> bytes:
    """The first line of standard input, or less if it ends before."""
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(0, 4096)):
        line += piece
    return line


def _new_event_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _serve(message: dict[str, Any], listener: socket.socket) -> bool:
    """Serve until told to end, or the supervisor is gone; returns whether another front end has taken the lease."""
    control = _connect(message["ray_address"], message["deployment"])
    app = create_app(ServerSettings(**message["server"]), control)
    front_end: FrontEnd = app.state.front_end
    config = uvicorn.Config(
        app, http="httptools", access_log=False, log_config=None, timeout_graceful_shutdown=CLOSE_TIMEOUT_S
    )
    server = Server(config)
    asked, orphaned = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    _on_end_of_input(lambda: loop.call_soon_threadsafe(orphaned.set))

    serving = asyncio.create_task(server.serve(sockets=[listener]))
    superseded = front_end.superseded
    others: list[asyncio.Task[Any]] = [asyncio.create_task(event.wait()) for event in (asked, orphaned, superseded)]
    others.append(asyncio.create_task(_tell_when_ready(front_end, server)))
    await asyncio.wait([serving, *others[:3]], return_when=asyncio.FIRST_COMPLETED)
    if asked.is_set() and not serving.done():
        front_end.begin_drain()
        others.append(asyncio.create_task(front_end.drained(message["drain_timeout_s"])))
        await asyncio.wait([serving, *others[1:3], others[-1]], return_when=asyncio.FIRST_COMPLETED)
    server.end()
    await serving
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return superseded.is_set()


def _connect(address: str, deployment: str) -> Any:
    import ray

    from moeray.deploy.control import RayControl
    from moeray.elastic.controller_config import ACTOR_NAME, namespace

    try:
        ray.init(
            address=address,
            namespace=namespace(deployment),
            log_to_driver=False,
            logging_level="error",
        )
        return RayControl(ray.get_actor(ACTOR_NAME))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise MoerayError(f"no way to the controller of {deployment!r} at {address}: {error}") from error


async def _tell_when_ready(front_end: FrontEnd, server: uvicorn.Server) -> None:
    while not server.started or front_end.cause() is not None:
        await asyncio.sleep(READY_POLL_S)
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()


def _on_end_of_input(call: Callable[[], object]) -> None:
    """A thread waits, without Python's buffer: its lock would be held when the interpreter ends."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has ended first
            call()

    threading.Thread(target=wait, name="end of input", daemon=True).start()


if __name__ == "__main__":
    main()
