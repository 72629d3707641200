"""Tiny random checkpoints of families with latent attention, as transformers writes them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moeray.worker.loader import SINGLE_NAME

NUM_LAYERS = 3
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_latent(directory: Path, model_type: str, *, down_scale: float = 1.0, **fields: Any) -> Path:
    """Write a random checkpoint and return its directory; biases and norms are random too, so that each counts.

    `down_scale` enlarges the outputs of all experts. Families that predict several tokens get a tensor of that layer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    first_dense = {} if model_type == "glm4_moe_lite" else {"first_k_dense_replace": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**TINY, **first_dense, **fields}))
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            tensor.copy_(torch.randn(tensor.shape) * 0.2 + (1.0 if "norm" in name else 0.0))
        if "experts" in name and "down_proj" in name:
            tensor.mul_(down_scale)
    model.save_pretrained(directory)
    if model_type != "deepseek_v2":
        tensors = load_file(directory / SINGLE_NAME)
        tensors[f"model.layers.{NUM_LAYERS}.eh_proj.weight"] = torch.zeros(64, 128)
        save_file(tensors, directory / SINGLE_NAME, metadata={"format": "pt"})
    return directory
