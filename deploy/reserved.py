"""How much memory a deployment keeps ready for sizes that it does not have yet, in words."""

from moeray.deploy.config import ServeConfig
from moeray.elastic.view import ModelView

MIB = 1 << 20


def reserved_text(config: ServeConfig, model: ModelView) -> str:
    """The limits of the deployment's size, and what each worker reserves so that no size between needs more."""
    seats = model.num_seats * model.seat_bytes
    spares = f", {config.spares} spare" if config.spares else ""
    empty = "; empty seats are untouched memory" if config.device == "cpu" else ""
    return (
        f"{config.workers} workers{spares}, may become {config.fewest_workers} to {config.most_workers} "
        f"(--min-workers, --max-workers). Each reserves {model.num_seats} seats a layer for experts, "
        f"{seats / MIB:.1f} MiB{empty}, and {model.buffer_bytes_per_worker / MIB:.1f} MiB of communication buffers."
    )
