"""Tiny random checkpoints with quantised weights, each beside the floating-point one that it decodes to."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import save_qwen3_moe

# The tensors of a quantised weight by the ending of their names, and the weight that they decode to.
Quantized = tuple[dict[str, torch.Tensor], torch.Tensor]
Quantize = Callable[[torch.Tensor], Quantized]

FP8_MAX = 448.0
INT8_MAX = 127
CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def fp8_config(block: int = 32, **fields: Any) -> dict[str, Any]:
    """As DeepSeek-V3 says it."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [block, block]}
    return config | fields


def int8_config(form: str = "int-quantized", **fields: Any) -> dict[str, Any]:
    """As compressed-tensors says it: W8A8 in plain int8, weights only if packed."""
    group = {"targets": ["Linear"], "weights": CHANNELS, "input_activations": None, "output_activations": None}
    if form == "int-quantized":
        group["input_activations"] = TOKENS
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return config | {"ignore": ["lm_head", "re:.*mlp.gate$"], "quantization_status": "compressed"} | fields


def to_fp8(block: int = 32) -> Quantize:
    """With a scale for each block of this many rows and columns."""

    def quantize(weight: torch.Tensor) -> Quantized:
        rows, columns = (-(-size // block) for size in weight.shape)
        scales = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                piece = weight[row * block : (row + 1) * block, column * block : (column + 1) * block]
                scales[row, column] = piece.abs().max() / FP8_MAX
        spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        numbers = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * spread

    return quantize


def to_int8(*, packed: bool = False) -> Quantize:
    """With a bf16 scale for each row; packed four to an int32, as compressed-tensors does it, or plain."""

    def quantize(weight: torch.Tensor) -> Quantized:
        scale = (weight.abs().amax(dim=1, keepdim=True) / INT8_MAX).bfloat16()
        numbers = (weight / scale.float()).round().clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8)
        decoded = numbers.float() * scale.float()
        if not packed:
            return {"weight": numbers, "weight_scale": scale}, decoded
        padded = torch.nn.functional.pad(numbers.int() + 128, (0, -numbers.shape[1] % 4)).view(len(numbers), -1, 4)
        words = sum(padded[..., place].long() << (8 * place) for place in range(4))
        assert isinstance(words, torch.Tensor)
        tensors = {"weight_packed": words.to(torch.int32), "weight_scale": scale}
        return tensors | {"weight_shape": torch.tensor(weight.shape)}, decoded

    return quantize


def is_linear(name: str) -> bool:
    """Whether checkpoints quantise this weight: projections, but neither routers nor the head."""
    return name.endswith("_proj.weight")


def save_quantized(
    directory: Path,
    quantize: Quantize,
    config: dict[str, Any],
    *,
    chosen: Callable[[str], bool] = is_linear,
    **overrides: Any,
) -> tuple[Path, Path]:
    """Write a random Qwen3-MoE with the weights that are `chosen` quantised, and what they decode to.

    Returns both directories.
    """
    decoded = save_qwen3_moe(directory / "decoded", **overrides)
    quantized = Path(shutil.copytree(decoded, directory / "quantized"))
    plain = load_file(decoded / "model.safetensors")
    stored = dict(plain)
    for name in filter(chosen, list(plain)):
        tensors, plain[name] = quantize(stored.pop(name).float())
        stored |= {name.removesuffix("weight") + ending: tensor for ending, tensor in tensors.items()}
    save_file(plain, decoded / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return quantized, decoded
