"""What loading took, and what was found in the weights, in words."""

from moeray.elastic.view import ModelView

MIB = 1 << 20
NAMES_SHOWN = 5


def loaded_text(model: ModelView) -> str:
    """Time and memory of the worker that took the most."""
    return (
        f"Each loaded {model.weights_bytes_per_worker / MIB:.1f} MiB of weights in {model.load_s:.1f} s, with at most "
        f"{model.load_peak_bytes_per_worker / MIB:.1f} MiB of private memory."
    )


def not_finite_text(model: ModelView) -> str:
    """Names the tensors with NaNs or infinities."""
    names = model.not_finite
    rest = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    listed = ", ".join(names[:NAMES_SHOWN]) + rest
    return f"The checkpoint has NaNs or infinities in {listed}: what it says may make no sense."
