"""Small files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from moeray.comm.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `CheckpointError` naming the file if it holds none."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, must hold an object")
    return raw
