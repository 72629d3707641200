"""Tiny random checkpoints of every causal language model with experts that the installed transformers knows."""

import re
from pathlib import Path
from typing import Any

import torch

# What the modelling code of such a model has.
HAS_EXPERTS = re.compile(r"use_experts_implementation|class \w*(Expert|Moe|MoE)\w*\(")
# Sizes that config classes may have; each gets those of them that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "unpadded_vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "dense_intermediate_size": 80,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "sliding_window": 24,
    "max_position_embeddings": 512,
    "model_max_length": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
# What an architecture needs beside or instead of those.
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere2_moe": {"logit_scale": 1.0},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
    },
    "ernie4_5_moe": {"moe_layer_end_index": 3},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
    },
    "dots3_note_text": {"head_dim": 24, "per_layer_config": {}, "shared_experts_intermediate_size": 32},
    "llama4_text": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen4_exp_text": {"layer_types": ["linear_attention"] * 4},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


def expert_models() -> dict[str, str]:
    """Causal language models with experts by model type: their architectures. Of two types the text model's counts."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    folder = Path(transformers.__file__).parent / "models"
    type_of = {}
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        sources = (folder / model_type_to_module_name(model_type)).glob("modeling_*.py")
        if any(HAS_EXPERTS.search(path.read_text()) for path in sources):
            type_of[str(architecture)] = model_type
    return {model_type: architecture for architecture, model_type in type_of.items()}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A config of few layers and small sizes."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[model_type]
    known = made().to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in sizes:  # latent attention: head_dim is another name for it, and all heads have keys
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return made(**{**sizes, **OVERRIDES.get(model_type, {}), **overrides})


def save_tiny(model_type: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint in which every tensor matters, and return its directory."""
    import transformers

    torch.manual_seed(seed)
    config = tiny_config(model_type, **overrides)
    model = getattr(transformers, expert_models()[model_type])(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *_kept_buffers(model)):
            noise = torch.randn(tensor.shape) * 0.1
            tensor.copy_(noise if tensor.dim() > 1 else tensor + noise)
    model.save_pretrained(directory)
    return directory


def _kept_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    kept = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point()]
