"""How requests are sampled that do not say it: what the checkpoint's generation_config.json asks for."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moeray.comm.errors import CheckpointError
from moeray.worker.models.json_object import read_object

FILE = "generation_config.json"
GENERATION_CONFIGS = ("auto", "none")
# What changes the text and is not implemented, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "top_h": (),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({},),
    "guidance_scale": (1, 1.0),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": ([],),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of the sampling fields that a request leaves out. `temperature` 0 is greedy, `top_k` 0 is off.

    `max_tokens` None is what the kind of request has. `unsupported` are settings of the checkpoint without effect.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    unsupported: tuple[str, ...] = ()

    @classmethod
    def read(cls, model_path: str | Path, generation_config: str = "auto") -> "SamplingDefaults":
        """Those of a checkpoint's directory; without the file, or with `none`, those of OpenAI's API.

        `do_sample` false is greedy, as in transformers; where it is left out, the other fields count. Raises
        `CheckpointError` naming the file, the field and the value that no request could have either.
        """
        path = Path(model_path) / FILE
        if generation_config == "none" or not path.is_file():
            return cls()
        raw = read_object(path)
        number = partial(_number, raw, path)
        fields = {
            "temperature": number("temperature", 0.0, 100.0),
            "top_p": number("top_p", 1e-9, 1.0),
            "top_k": number("top_k", -1, 1 << 31, whole=True),
            "min_p": number("min_p", 0.0, 1.0),
            "repetition_penalty": number("repetition_penalty", 1e-3, 100.0),
            "max_tokens": number("max_new_tokens", 1, 1 << 31, whole=True),
        }
        if raw.get("do_sample") is False:
            fields["temperature"] = 0.0
        given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        if "top_k" in given:
            given["top_k"] = max(0, given["top_k"])
        unsupported = tuple(
            f"{name}={raw[name]!r}" for name, harmless in UNSUPPORTED.items() if raw.get(name) not in (None, *harmless)
        )
        return cls(**given, unsupported=unsupported)

    def text(self) -> str:
        """In one line, for a person."""
        if self.temperature == 0.0:
            words = ["greedy"]
        else:
            words = [f"temperature {self.temperature:g}"]
            for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                if (value := getattr(self, name)) != off:
                    words.append(f"{name} {value:g}")
        if self.repetition_penalty != 1.0:
            words.append(f"repetition_penalty {self.repetition_penalty:g}")
        if self.max_tokens is not None:
            words.append(f"max_tokens {self.max_tokens}")
        return ", ".join(words)


def _number(raw: Mapping[str, Any], path: Path, name: str, low: float, high: float, *, whole: bool = False) -> Any:
    """The field's value; None if it is absent or null."""
    value = raw.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise CheckpointError(
            f"{path}: {name} is {value!r}, must be {kind} from {low:g} to {high:g} "
            "(generation_config none leaves the file out)"
        )
    return value
