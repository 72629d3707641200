"""How the front end is set up: one frozen value that `deploy/` fills from the command line."""

import math
from dataclasses import dataclass

from moeray.api.defaults import GENERATION_CONFIGS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of `create_app`.

    `model_path` is a local directory, with `tokenizer.json` if text is served. `generation_config` none leaves the
    checkpoint's sampling defaults out. `max_inflight_per_worker` is how many sequences a
    worker gets at a time (its `max_num_seqs`); more wait here, shared by all workers, `max_queue` at most,
    and then clients get 429. `request_timeout_s` None lets a request take as long as it needs. While nothing
    serves, requests wait up to `recovery_timeout_s` and then end with an error. Without `api_key` generation is
    open; without `admin_key` so is control. `min_workers` and `max_workers` are the deployment's, told to callers
    who ask for something that is no number; the controller holds them.
    """

    model_path: str
    served_name: str
    generation_config: str = "auto"
    api_key: str | None = None
    admin_key: str | None = None
    min_workers: int = 1
    max_workers: int = 4
    max_queue: int = 1024
    max_inflight_per_worker: int = 128
    max_choices: int = 1024
    request_timeout_s: float | None = None
    recovery_timeout_s: float = 30.0
    max_body_bytes: int = 8 << 20
    heartbeat_s: float = 2.0
    view_poll_s: float = 20.0

    def __post_init__(self) -> None:
        for name, text in (("model_path", self.model_path), ("served_name", self.served_name)):
            if not text:
                raise ValueError(f"{name} is empty, must be given")
        if self.generation_config not in GENERATION_CONFIGS:
            choices = ", ".join(GENERATION_CONFIGS)
            raise ValueError(f"generation_config is {self.generation_config!r}, must be one of {choices}")
        for name, key in (("api_key", self.api_key), ("admin_key", self.admin_key)):
            if key is not None and (not key or not key.isascii() or not key.isprintable()):
                raise ValueError(f"{name} is given, must be printable ASCII and not empty")
        for name, number, low in (
            ("min_workers", self.min_workers, 1),
            ("max_workers", self.max_workers, self.min_workers),
            ("max_queue", self.max_queue, 1),
            ("max_inflight_per_worker", self.max_inflight_per_worker, 1),
            ("max_choices", self.max_choices, 1),
            ("max_body_bytes", self.max_body_bytes, 1024),
            ("heartbeat_s", self.heartbeat_s, 0.01),
            ("view_poll_s", self.view_poll_s, 0.01),
        ):
            if not number >= low:
                raise ValueError(f"{name} is {number}, must be at least {low}")
        if not 0 < self.recovery_timeout_s < math.inf:
            raise ValueError(f"recovery_timeout_s is {self.recovery_timeout_s}, must be more than 0 and finite")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ValueError(f"request_timeout_s is {self.request_timeout_s}, must be more than 0")
