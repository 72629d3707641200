"""Which families there are, and the way from a checkpoint directory to its family. No torch here."""

from pathlib import Path

from moeray.comm.errors import CheckpointError
from moeray.worker.models import qwen3_moe
from moeray.worker.models.config import ConfigReader, DecoderConfig, read_raw_config
from moeray.worker.models.family import Family
from moeray.worker.models.weight_names import WeightNames

FAMILIES: dict[str, Family] = {family.architecture: family for family in (qwen3_moe.FAMILY,)}


def read_decoder_config(model_path: str | Path) -> DecoderConfig:
    """The decoder that a checkpoint directory describes.

    Raises `CheckpointError` for an unknown architecture, a missing or malformed field, and every field that changes
    the mathematics and is not implemented, each by name.
    """
    raw, path = read_raw_config(model_path)
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointError(f"{path}: architectures is {names!r}, must name exactly one")
    family = FAMILIES.get(names[0])
    if family is None:
        raise CheckpointError(f"{path}: architecture {names[0]!r} is not supported (supported: {', '.join(FAMILIES)})")
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method")
        raise CheckpointError(f"{path}: quantization_config.quant_method is {method!r}, which is not implemented")
    reader = ConfigReader(raw, path)
    config = family.read_config(reader)
    reader.finish()
    return config


def weight_names(config: DecoderConfig) -> WeightNames:
    """How the config's family names its tensors on disk."""
    return FAMILIES[config.architecture].weight_names
