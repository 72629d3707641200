"""Which families there are, and the way from a checkpoint to its model. No torch is imported with this module."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moeray.comm.errors import CheckpointError
from moeray.worker.models import (
    deepseek,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    llama4,
    minimax_m2,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
)
from moeray.worker.models.config import DecoderConfig, ModelConfig
from moeray.worker.models.config_reader import ConfigReader, read_raw_config
from moeray.worker.models.family import Family
from moeray.worker.models.transformers_config import TransformersConfig, read_transformers_config
from moeray.worker.moe.quant.checkpoint import QuantizedCheckpoint
from moeray.worker.moe.quant.registry import read_quantization

if TYPE_CHECKING:
    from moeray.worker.models.model import ServedModel
    from moeray.worker.moe.factory import MoEEnvironment

NATIVE = (
    qwen3_moe.FAMILY,
    qwen2_moe.FAMILY,
    mixtral.FAMILY,
    olmoe.FAMILY,
    glm4_moe.FAMILY,
    minimax_m2.FAMILY,
    ernie4_5_moe.FAMILY,
    phimoe.FAMILY,
    gpt_oss.FAMILY,
    llama4.FAMILY,
    deepseek.V2,
    deepseek.V3,
    deepseek.GLM4_MOE_LITE,
)
FAMILIES: dict[str, Family] = {name: family for family in NATIVE for name in (family.architecture, *family.aliases)}


def read_model_config(model_path: str | Path, model_impl: str = "auto") -> ModelConfig:
    """The model that a checkpoint directory describes, implemented as `WorkerConfig.model_impl` says.

    Raises `CheckpointError` for an unknown architecture, a missing or malformed field, and, for a native family, every
    field that changes the mathematics and is not implemented, each by name.
    """
    raw, path = read_raw_config(model_path)
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointError(f"{path}: architectures is {names!r}, must name exactly one")
    family = FAMILIES.get(names[0])
    if model_impl == "native" and family is None:
        raise CheckpointError(f"{path}: architecture {names[0]!r} is not native (native: {', '.join(FAMILIES)})")
    reader = ConfigReader(raw, path)
    if family is None or model_impl == "transformers":
        return read_transformers_config(reader)
    quantization = _read_quantization(reader, family)
    config = replace(family.read_config(reader), quantization=quantization)
    reader.finish()
    return config


def _read_quantization(reader: ConfigReader, family: Family) -> QuantizedCheckpoint | None:
    raw = reader.get("quantization_config")
    if raw is None or (isinstance(raw, dict) and raw.get("quant_method") in family.quant_methods):
        return None
    return read_quantization(raw, f"{reader.path}: quantization_config", also=family.quant_methods)


def make_model(
    config: ModelConfig, present: Collection[str], environment: "MoEEnvironment", max_model_len: int
) -> "ServedModel":
    """The model that serves this config, with empty parameters; `present` are the names of the checkpoint's tensors.

    transformers' modelling code is imported for a model that goes through it only. Raises `CheckpointError`.
    """
    if isinstance(config, TransformersConfig):
        from moeray.worker.models.transformers_model import TransformersModel

        return TransformersModel(config, present, environment)
    from moeray.worker.models.decoder import Decoder

    assert isinstance(config, DecoderConfig)
    names = FAMILIES[config.architecture].weight_names
    return Decoder(config, names, present, environment, max_model_len)
