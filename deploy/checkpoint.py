"""From what the user typed as MODEL to a local directory that looks like a checkpoint we can serve.

Cheap checks only, in the supervisor, before any process starts: a mistake costs the user a second.
"""

import json
import re
from pathlib import Path

from moeray.api.tokenizer import Tokenizer
from moeray.comm.errors import CheckpointError
from moeray.deploy.config import DEMO
from moeray.elastic.view import ModelView
from moeray.worker.models.config import ModelConfig
from moeray.worker.models.registry import read_model_config

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
NEEDED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
INDEX_FILE = "model.safetensors.index.json"


def resolve(model: str) -> Path:
    """The checkpoint's directory: the packaged demo, a directory, or a hub name, which is downloaded if need be.

    Raises `CheckpointError`.
    """
    if model == DEMO:
        return Path(__file__).resolve().parent / "demo" / "model"
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise CheckpointError(f"{model} is a file, must be a directory with config.json and *.safetensors")
    if not HUB_NAME.fullmatch(model):
        raise CheckpointError(f"{model}: no such directory, and not a hub name of the form owner/name")
    return _download(model)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(NEEDED_FILES)))
    except LocalEntryNotFoundError:
        raise CheckpointError(f"{name}: no such directory, not in the hub's cache, no way to the hub") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name}: could not be fetched from the hub: {reason}") from error


def inspect(path: Path, model_impl: str = "auto") -> ModelConfig:
    """The checkpoint's configuration, after a look at its files. Raises `CheckpointError` that names the file."""
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: config.json is missing")
    config = read_model_config(path, model_impl)
    for shard in _shards(path):
        if not (path / shard).is_file():
            raise CheckpointError(f"{path}: {shard} is missing")
    Tokenizer.load(str(path))
    return config


def check_served(config: ModelConfig, model: ModelView, deployment: str) -> None:
    """Raises `CheckpointError` if the deployment evidently serves another checkpoint than this one."""
    for name in ("num_moe_layers", "num_experts", "vocab_size"):
        here, there = getattr(config, name), getattr(model, name)
        if here != there:
            raise CheckpointError(f"MODEL has {name} {here}, what deployment {deployment!r} serves has {there}")


def _shards(path: Path) -> list[str]:
    index = path / INDEX_FILE
    if not index.is_file():
        shards = sorted(file.name for file in path.glob("*.safetensors"))
        if not shards:
            raise CheckpointError(f"{path}: no *.safetensors file and no {INDEX_FILE}")
        return shards
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return sorted(set(weight_map.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: not an index of weights: {error!r}") from error
