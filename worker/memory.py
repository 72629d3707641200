"""How much memory a worker needs and gives to its KV cache, said before it is taken."""

from collections.abc import Collection
from dataclasses import dataclass

import psutil
import torch

from moeray.comm.errors import CapacityError
from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement
from moeray.worker.config import BLOCK_SIZE, WorkerConfig
from moeray.worker.kernels.library import row_kernel
from moeray.worker.kv_cache import blocks_for
from moeray.worker.models.config import ModelConfig
from moeray.worker.models.model import ServedModel

# Of the memory that is free when a worker starts, the share that all caches of a host may take together.
KV_SHARE = 0.5
# Nobody needs a larger cache by default: sequences beyond this wait.
DEFAULT_KV_TOKENS = 1 << 18

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKPOINT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """`num_blocks` counts the block that pads block tables."""

    num_blocks: int
    kv_cache_bytes: int
    weights_bytes: int


def choose_dtype(requested: str, config: ModelConfig, device: str) -> str:
    """`auto` is the checkpoint's type on CUDA and on CPUs with matrix units for bf16, and fp32 on other CPUs.

    Without such units bf16 and fp16 products are many times slower than fp32's.
    """
    if requested != "auto":
        return requested
    checkpoint_dtype = CHECKPOINT_DTYPES.get(config.checkpoint_dtype, "bf16")
    is_fast = device != "cpu" or (checkpoint_dtype == "bf16" and torch.cpu._is_amx_tile_supported())
    return checkpoint_dtype if is_fast else "fp32"


def choose_weights(requested: str, dtype: str, stored: Collection[str], device: str) -> str:
    """What projections are stored in; `stored` are the types of the checkpoint's matrices, named as torch does.

    `auto` is their own type, if they share one that the kernel for few rows takes: that loses nothing, and a decode
    step reads half of the bytes. Raises `ValueError` for a type that nothing can compute with here.
    """
    can_be_narrow = device == "cpu" and dtype == "fp32" and row_kernel() is not None
    if requested == "auto":
        own = {CHECKPOINT_DTYPES.get(name, dtype) for name in stored}
        return own.pop() if can_be_narrow and len(own) == 1 else dtype
    if requested != dtype and not can_be_narrow:
        raise ValueError(
            f"weights is {requested!r}, must be auto or {dtype}, the dtype: others need --dtype fp32 on a CPU, and a "
            "compiler when moeray was installed"
        )
    return requested


def free_memory_bytes(device: str) -> int:
    """Memory that a worker could take now."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return int(free)
    return int(psutil.virtual_memory().available)


def weights_bytes(model: ServedModel, placement: ExpertPlacement | None, slot: int) -> int:
    """Bytes of a worker's weights: what all have, and its own experts; empty seats take memory on CUDA only."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    for layer, runner in enumerate(model.moe_runners()):
        experts = runner.routed_experts
        if experts.device.type != "cpu":
            continue
        seats = placement.seats_of(layer, slot) if placement else ()
        num_empty = experts.num_seats - sum(expert != EMPTY_SEAT for expert in seats)
        total -= num_empty * experts.seat_nbytes
    return total


def plan_memory(
    worker: WorkerConfig, model: ServedModel, *, max_model_len: int, weights: int, free: int, dtype: str
) -> MemoryPlan:
    """Size the KV cache, given the bytes of weights and those that were free before them.

    Raises `CapacityError` if weights or one sequence of full length do not fit.
    """
    if weights > free:
        raise CapacityError(f"the weights need {weights >> 20} MiB, {free >> 20} MiB are free")
    numbers = sum(shape.numbers_per_token for shape in model.cache_shapes())
    block = numbers * TORCH_DTYPES[dtype].itemsize * BLOCK_SIZE
    needed = (blocks_for(max_model_len) + 1) * block
    budget = worker.kv_cache_bytes
    if budget is None:
        share = int((free - weights) * KV_SHARE) // worker.max_workers
        useful = blocks_for(min(DEFAULT_KV_TOKENS, worker.max_num_seqs * max_model_len)) * block
        budget = max(min(useful, share), min(needed, share * worker.max_workers))
    if budget < needed:
        raise CapacityError(
            f"the KV cache would get {budget >> 20} MiB, one sequence of {max_model_len} tokens needs "
            f"{-(-needed >> 20)} MiB: lower max_model_len or raise kv_cache_bytes"
        )
    if weights + budget > free:
        raise CapacityError(
            f"weights ({weights >> 20} MiB) and KV cache ({budget >> 20} MiB) exceed the free {free >> 20} MiB"
        )
    num_blocks = budget // block
    return MemoryPlan(num_blocks=num_blocks, kv_cache_bytes=num_blocks * block, weights_bytes=weights)
