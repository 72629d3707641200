"""What a worker is told at start. No torch here: the controller builds these, and the command line prints them."""

from dataclasses import dataclass

from moeray.comm.calls import Address

DTYPES = ("auto", "fp32", "bf16", "fp16")
WEIGHTS = ("auto", "fp32", "bf16", "fp16")
COMBINE_MODES = ("auto", "exact", "fast")
DISPATCHERS = ("auto", "loopback", "all_gather", "all_to_all")
MODEL_IMPLS = ("auto", "native", "transformers")
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The same for every worker of a deployment.

    `model_path` is a local directory with a checkpoint. `max_model_len` None takes the checkpoint's own limit.
    `kv_cache_bytes` None sizes the cache from free memory (see `worker/kv_cache.py`). `num_seats` is the number of
    experts that a worker reserves room for, per layer. `dtype` is what is computed in, `weights` what projections are
    stored in. `max_num_batched_tokens` is the token budget of a step and `max_num_seqs` the most sequences in it.
    `model_impl` says who implements the model; `auto` is a native family if there is one, else transformers.
    """

    model_path: str
    num_seats: int
    max_workers: int
    device: str = "cpu"
    dtype: str = "auto"
    weights: str = "auto"
    combine: str = "auto"
    dispatcher: str = "auto"
    model_impl: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    max_queue: int = 1024
    prefix_caching: bool = True
    kv_cache_bytes: int | None = None
    num_threads: int = 1
    group_timeout_s: float = 60.0
    orphan_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("device", self.device, ("cpu", "cuda")),
            ("dtype", self.dtype, DTYPES),
            ("weights", self.weights, WEIGHTS),
            ("combine", self.combine, COMBINE_MODES),
            ("dispatcher", self.dispatcher, DISPATCHERS),
            ("model_impl", self.model_impl, MODEL_IMPLS),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}, must be one of {', '.join(choices)}")
        for name, number, low in (
            ("num_seats", self.num_seats, 1),
            ("max_workers", self.max_workers, 1),
            ("max_num_seqs", self.max_num_seqs, 1),
            ("max_num_batched_tokens", self.max_num_batched_tokens, 1),
            ("max_queue", self.max_queue, 1),
            ("num_threads", self.num_threads, 1),
            ("group_timeout_s", self.group_timeout_s, 0.1),
            ("orphan_timeout_s", self.orphan_timeout_s, 1.0),
        ):
            if number < low:
                raise ValueError(f"{name} is {number}, must be at least {low}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}, must be at least 2")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ValueError(f"kv_cache_bytes is {self.kv_cache_bytes}, must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can decode in one step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint has: its small files by name, and of each tensor the type's name in torch and the shape."""

    files: dict[str, bytes]
    tensors: dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """What a worker answers once its weights are loaded and its inbox listens.

    `seat_bytes` are those of one seat in every MoE layer, `load_peak_bytes` the most private memory that loading took,
    `not_finite` tensors with NaNs or infinities. `control` is where its process takes commands, None if it is driven
    from within.
    """

    slot: int
    incarnation: int
    pid: int
    node: str
    endpoint: str
    public_key: str
    dtype: str
    weights: str
    combine: str
    num_moe_layers: int
    num_experts: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    weights_bytes: int
    kv_cache_bytes: int
    buffer_bytes: int
    seat_bytes: int
    load_s: float
    load_peak_bytes: int
    not_finite: tuple[str, ...]
    control: Address | None = None
