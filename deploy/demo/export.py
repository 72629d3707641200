"""Writes the demo model as transformers and the other engines read it: fp16, one tensor an expert."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor

from moeray.deploy.demo.network import DemoConfig, DemoModel

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)


def to_fp16(model: DemoModel) -> tuple[dict[str, Tensor], float]:
    """transformers' names and fp16 values; and the largest rounding error. Raises `ValueError` on a value
    that fp16 cannot hold."""
    tensors: dict[str, Tensor] = {}
    error = 0.0
    for name, value in _named(model):
        stored = value.detach().half()
        if not torch.isfinite(stored).all():
            raise ValueError(f"{name}: largest value {value.abs().max():.4g}, fp16 ends at 65504")
        error = max(error, (stored.float() - value).abs().max().item())
        tensors[name] = stored.contiguous()
    return tensors, error


def round_to_fp16(model: DemoModel) -> None:
    """Afterwards the model computes with exactly the values that are stored."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())


def write(folder: Path, model: DemoModel, tokenizer: Tokenizer, card: str) -> None:
    """Afterwards `folder` holds the whole model. Files are replaced whole, so readers see no half file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, _ = to_fp16(model)
    files = {
        "config.json": _json(_hf_config(model.config)),
        "generation_config.json": _json({"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}),
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": _json(_tokenizer_config(model.config)),
        "model.safetensors": save(tensors, metadata={"format": "pt"}),
        "README.md": card.encode(),
    }
    for name, content in files.items():
        temporary = folder / f".{name}.tmp"
        temporary.write_bytes(content)
        os.replace(temporary, folder / name)


def count_parameters(config: DemoConfig) -> tuple[int, int]:
    """All parameters, and those that one token uses; the tied embedding counts once."""
    total = sum(p.numel() for p in DemoModel(config).parameters())
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = config.num_experts - config.num_experts_per_tok
    return total, total - config.num_hidden_layers * idle * expert


def _named(model: DemoModel) -> list[tuple[str, Tensor]]:
    c = model.config
    query_dim, kv_dim = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    named: list[tuple[str, Tensor]] = [("model.embed_tokens.weight", model.embed_tokens)]
    for number, layer in enumerate(model.blocks()):
        at = f"model.layers.{number}."
        q, k, v = torch.split(layer.qkv_proj, [query_dim, kv_dim, kv_dim])
        for name, value in zip("qkvo", (q, k, v, layer.o_proj), strict=True):
            named.append((f"{at}self_attn.{name}_proj.weight", value))
        named += [
            (f"{at}self_attn.q_norm.weight", layer.q_norm),
            (f"{at}self_attn.k_norm.weight", layer.k_norm),
            (f"{at}input_layernorm.weight", layer.input_norm),
            (f"{at}post_attention_layernorm.weight", layer.post_norm),
            (f"{at}mlp.gate.weight", layer.gate),
        ]
        for expert_id, (w13, w2) in enumerate(zip(layer.w13_EFD, layer.w2_EDF, strict=True)):
            gate, up = w13.chunk(2)
            for name, value in (("gate", gate), ("up", up), ("down", w2)):
                named.append((f"{at}mlp.experts.{expert_id}.{name}_proj.weight", value))
    return [*named, ("model.norm.weight", model.norm)]


def _hf_config(config: DemoConfig) -> dict[str, Any]:
    return asdict(config) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "float16",
        "intermediate_size": config.moe_intermediate_size * config.num_experts_per_tok,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "rope_scaling": None,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _tokenizer_config(config: DemoConfig) -> dict[str, Any]:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(i): {"content": t} | special for i, t in enumerate(SPECIAL_TOKENS)},
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "chat_template": CHAT_TEMPLATE,
    }


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
