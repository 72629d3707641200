"""What an actor's process needs beside the actor: where its log lines go."""

import logging

from moeray.elastic.controller import Controller
from moeray.elastic.controller_config import ControllerConfig
from moeray.elastic.member import WorkerFactory

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr() -> None:
    """Log lines of this process go to its standard error, which Ray keeps in a file of the session."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)


class ControllerActor(Controller):
    """The controller in a process of its own."""

    def __init__(self, config: ControllerConfig, worker_factory: WorkerFactory) -> None:
        log_to_stderr()
        super().__init__(config, worker_factory)
