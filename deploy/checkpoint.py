"""From what the user typed as MODEL to a local directory that looks like a checkpoint we can serve.

Cheap checks only, in the supervisor, before any process starts: a mistake costs the user a second.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from moeray.api.defaults import FILE, SamplingDefaults
from moeray.api.id_tokenizer import IDS_ONLY
from moeray.api.tokenizer import load_tokenizer
from moeray.comm.errors import CheckpointError
from moeray.deploy.config import DEMO
from moeray.elastic.view import ModelView
from moeray.worker.models.config import ModelConfig
from moeray.worker.models.registry import read_model_config

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
NEEDED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
# The same weights again, in the format of those who trained them.
OTHER_FORMATS = ("original/*", "consolidated*")
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
        return Path(snapshot_download(name, allow_patterns=list(NEEDED_FILES), ignore_patterns=list(OTHER_FORMATS)))
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
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What the user should know of a checkpoint, in lines, and whether it has a tokenizer."""

    lines: tuple[str, ...]
    has_text: bool


def notes(path: Path, generation_config: str) -> Notes:
    """Sampling defaults, and what is missing or has no effect.

    Raises `CheckpointError` for a tokenizer or a generation_config.json that cannot be read.
    """
    tokenizer, defaults = load_tokenizer(str(path)), SamplingDefaults.read(path, generation_config)
    lines = [f"Requests that do not say it otherwise: {defaults.text()}{_origin(path, defaults, generation_config)}."]
    if defaults.unsupported:
        lines.append(f"generation_config.json has settings without effect here: {', '.join(defaults.unsupported)}.")
    if not tokenizer.has_text:
        lines.append(f"No text: {IDS_ONLY}.")
    return Notes(lines=tuple(lines), has_text=tokenizer.has_text)


def _origin(path: Path, defaults: SamplingDefaults, generation_config: str) -> str:
    if generation_config == "none" and (path / FILE).is_file():
        return f" ({FILE} left out)"
    return "" if defaults == SamplingDefaults() else f" ({FILE}; --generation-config none leaves it out)"


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
