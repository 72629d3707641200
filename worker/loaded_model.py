"""From a checkpoint to a model that can run: what a worker makes once and keeps for life."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moeray.comm.buffers import BufferCapacity, CommunicationBuffers, prepare_communication_buffer_for_model
from moeray.comm.errors import CapacityError
from moeray.comm.exchange import ExpertExchange
from moeray.comm.placement import ExpertPlacement
from moeray.worker.config import WorkerConfig
from moeray.worker.load_memory import LoadMemory
from moeray.worker.loader import Checkpoint, LoadReport, load_weights
from moeray.worker.memory import (
    TORCH_DTYPES,
    choose_dtype,
    choose_weights,
    free_memory_bytes,
    plan_memory,
    weights_bytes,
)
from moeray.worker.models.config import ModelConfig
from moeray.worker.models.model import ServedModel
from moeray.worker.models.paged_cache import PagedKVCache
from moeray.worker.models.registry import make_model, read_model_config
from moeray.worker.moe.expert_load import ExpertLoad
from moeray.worker.moe.factory import MoEEnvironment
from moeray.worker.peer_checkpoint import CheckpointSource, open_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights, experts' seats, cache and buffers; nothing of it is made again later."""

    model: ServedModel
    checkpoint: Checkpoint
    cache: PagedKVCache
    buffers: CommunicationBuffers
    exchange: ExpertExchange
    expert_load: ExpertLoad
    max_model_len: int
    dtype: str
    weights: str
    combine: str
    weights_bytes: int
    report: LoadReport


def choose_combine(requested: str, device: str) -> str:
    """`auto` is exact on CPU and fast on CUDA."""
    return requested if requested != "auto" else "exact" if device == "cpu" else "fast"


def choose_max_model_len(requested: int | None, config: ModelConfig) -> int:
    """Raises `ValueError` for more than the checkpoint's positions."""
    limit = config.max_position_embeddings
    if requested is not None and requested > limit:
        raise ValueError(f"max_model_len is {requested}, the checkpoint's limit is {limit}")
    return requested if requested is not None else limit


def load_model(
    worker: WorkerConfig,
    placement: ExpertPlacement | None,
    slot: int,
    on_progress: Callable[[float], None],
    source: CheckpointSource | None = None,
) -> LoadedModel:
    """Everything of a worker that needs the checkpoint: read its part, build kernels, allocate cache and buffers.

    Without a placement all seats stay empty. Raises `CheckpointError`, `CapacityError` or `ValueError` with the cause.
    """
    device = torch.device(worker.device)
    checkpoint = open_checkpoint(worker.model_path, source)
    config = read_model_config(checkpoint.directory, worker.model_impl)
    max_model_len = choose_max_model_len(worker.max_model_len, config)
    dtype = choose_dtype(worker.dtype, config, worker.device)
    stored = choose_weights(worker.weights, dtype, checkpoint.matrix_dtypes(), worker.device)
    combine = choose_combine(worker.combine, worker.device)
    exchange = ExpertExchange(combine=combine, dispatcher=worker.dispatcher, device=device)
    expert_load = ExpertLoad(num_layers=config.num_moe_layers, num_experts=config.num_experts)
    environment = MoEEnvironment(
        exchange=exchange,
        expert_load=expert_load,
        num_seats=worker.num_seats,
        dtype=TORCH_DTYPES[dtype],
        weights_dtype=TORCH_DTYPES[stored],
        device=device,
        row_exact=combine == "exact" and dtype == "fp32" and worker.device == "cpu",
    )
    memory = LoadMemory(device)
    free = free_memory_bytes(worker.device)
    model = _make_model(config, checkpoint, environment, max_model_len)
    weights = weights_bytes(model, placement, slot)
    plan = plan_memory(worker, model, max_model_len=max_model_len, weights=weights, free=free, dtype=dtype)
    report = load_weights(model, checkpoint, placement, slot, on_progress, memory)
    model.warm_up(worker.max_num_batched_tokens)
    capacity = BufferCapacity(max_workers=worker.max_workers, max_tokens=worker.max_num_batched_tokens)
    buffers = prepare_communication_buffer_for_model(model, capacity, device)
    exchange.attach_buffers(buffers)
    cache = PagedKVCache(model.cache_shapes(), num_blocks=plan.num_blocks, dtype=TORCH_DTYPES[dtype], device=device)
    return LoadedModel(
        model=model,
        checkpoint=checkpoint,
        cache=cache,
        buffers=buffers,
        exchange=exchange,
        expert_load=expert_load,
        max_model_len=max_model_len,
        dtype=dtype,
        weights=stored,
        combine=combine,
        weights_bytes=plan.weights_bytes,
        report=report,
    )


def _make_model(
    config: ModelConfig, checkpoint: Checkpoint, environment: MoEEnvironment, max_model_len: int
) -> ServedModel:
    """Parameters take memory here on CUDA; on CPU not before something is written to them."""
    try:
        return make_model(config, checkpoint.file_of.keys(), environment, max_model_len)
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"the weights do not fit on {environment.device}: {error}") from error
