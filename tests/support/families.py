"""A tiny random checkpoint for each native family, made with transformers, with features that make a difference."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 150000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [4.0] * 8,
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 192,
}


@dataclass(frozen=True)
class TinyFamily:
    """`architecture` is a class of transformers; `fields` go over `SMALL` in its config."""

    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, TinyFamily] = {
    "qwen2_moe": TinyFamily(
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "intermediate_size": 80,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "mixtral": TinyFamily(
        "MixtralForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48, "sliding_window": 24},
    ),
    "olmoe": TinyFamily(
        "OlmoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 32, "clip_qkv": 1.5},
    ),
    "glm4_moe": TinyFamily(
        "Glm4MoeForCausalLM",
        {
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "intermediate_size": 80,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "minimax_m2": TinyFamily(
        "MiniMaxM2ForCausalLM",
        {
            "head_dim": 32,
            "rotary_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
        },
    ),
    "ernie4_5_moe": TinyFamily(
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "intermediate_size": 80,
            "tie_word_embeddings": True,
        },
    ),
    "phimoe": TinyFamily(
        "PhimoeForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": LONGROPE,
        },
    ),
    "gpt_oss": TinyFamily(
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": 20,
            "rope_parameters": YARN,
        },
    ),
    "llama4": TinyFamily(
        "Llama4ForCausalLM",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "intermediate_size": 48,
            "intermediate_size_mlp": 80,
            "moe_layers": [0, 2, 3],
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 24,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "rope_parameters": LLAMA3,
        },
    ),
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that spread logits and router choices, biases and norms that show if they are left out."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensor.copy_(1.0 + 0.3 * noise)
        elif tensor.dim() == 1 or "bias" in name:
            tensor.copy_(0.3 * noise)
        elif "embed_tokens" in name:
            tensor.copy_(noise)
        else:
            is_router = "router" in name or name.endswith(".gate.weight")
            tensor.copy_(noise * (4.0 if is_router else 1.5) / math.sqrt(64))


def save_family(directory: Path, name: str, *, seed: int = 0, **fields: Any) -> Path:
    """Write a random checkpoint of a family and return its directory."""
    import transformers

    family = FAMILIES[name]
    model_class = getattr(transformers, family.architecture)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**{**SMALL, **family.fields, **fields}))
    with torch.no_grad():
        randomise(model, seed)
    model.save_pretrained(directory)
    return directory
