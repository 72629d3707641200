"""What a family of models is to the rest: a way to read its config, and names of its tensors. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass

from moeray.worker.models.config import ConfigReader, DecoderConfig
from moeray.worker.models.weight_names import WeightNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`architecture` is the name in config.json; `read_config` raises `CheckpointError` for what is not implemented."""

    architecture: str
    weight_names: WeightNames
    read_config: Callable[[ConfigReader], DecoderConfig]
