"""How much memory a deployment keeps ready for sizes that it does not have yet, in words."""

from moeray.deploy.config import ServeConfig
from moeray.elastic.view import ModelView
from moeray.worker.models.config import ModelConfig

MIB = 1 << 20
ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


def seat_bytes(decoder: ModelConfig, dtype: str) -> int:
    """Bytes of one seat in every MoE layer: gate, up and down projection of an expert, and their biases."""
    hidden, inner = decoder.hidden_size, decoder.moe.intermediate_size
    per_layer = 3 * hidden * inner + (2 * inner + hidden if decoder.moe.expert_bias else 0)
    return per_layer * decoder.num_moe_layers * ITEMSIZES[dtype]


def reserved_text(config: ServeConfig, decoder: ModelConfig, model: ModelView) -> str:
    """The limits of the deployment's size, and what each worker reserves so that no size between needs more."""
    seats = model.num_seats * seat_bytes(decoder, model.weights)
    spares = f", {config.spares} spare" if config.spares else ""
    empty = "; empty seats are untouched memory" if config.device == "cpu" else ""
    return (
        f"{config.workers} workers{spares}, may become {config.fewest_workers} to {config.most_workers} "
        f"(--min-workers, --max-workers). Each reserves {model.num_seats} seats a layer for experts, "
        f"{seats / MIB:.1f} MiB{empty}, and {model.buffer_bytes_per_worker / MIB:.1f} MiB of communication buffers."
    )
