"""The Ray actor around a worker: it gives the worker a process, and takes no part in what happens there."""

import logging
import os
from typing import ClassVar

import ray

from moeray.comm.calls import Address, CallServer
from moeray.comm.sockets import KeyPair, new_key_pair
from moeray.worker.config import WorkerConfig
from moeray.worker.control import WorkerControl


class WorkerActor:
    """`deploy/` makes a Ray actor of it, which takes Ray's calls one by one: `listen`, then `run`, which stays.

    A call to `run` that waits behind another ends with the process, and tells of its death.
    """

    control_class: ClassVar[type[WorkerControl]] = WorkerControl

    def __init__(self, slot: int, incarnation: int, config: WorkerConfig, client: KeyPair, bind_host: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        host = bind_host or ray.util.get_node_ip_address()
        self._server = CallServer(host=host, keys=new_key_pair(), client_keys=(client.public,))
        self._control = self.control_class(slot, incarnation, config, client, host, self._server.address)

    def listen(self) -> tuple[Address, int, str]:
        """Where the worker takes its commands from now on; its process id, and the id of its Ray node."""
        return self._server.address, os.getpid(), ray.get_runtime_context().get_node_id()

    def run(self) -> None:
        """Carry commands out until the process ends. Blocks the process's main thread, which is Ray's."""
        self._server.run(self._control)
