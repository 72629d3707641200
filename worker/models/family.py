"""What a family of models is to the rest: a way to read its config, and names of its tensors. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass, field

from moeray.worker.models.config import DecoderConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.weight_names import WeightNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`architecture` is the name in config.json; `read_config` raises `CheckpointError` for what is not implemented.

    `aliases` are names that older checkpoints use for it, and `quant_methods` are those whose checkpoints can be read.
    """

    architecture: str
    read_config: Callable[[ConfigReader], DecoderConfig]
    weight_names: WeightNames = field(default_factory=WeightNames)
    aliases: tuple[str, ...] = ()
    quant_methods: tuple[str, ...] = ()
