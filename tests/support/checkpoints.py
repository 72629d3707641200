"""Tiny random checkpoints that tests make for themselves, in the layout that transformers writes."""

from pathlib import Path
from typing import Any

import torch

from moeray.worker.loader import Checkpoint
from moeray.worker.peer_checkpoint import LocalSource

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 320,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_qwen3_moe(directory: Path, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Write a random Qwen3-MoE checkpoint and return its directory. Weights are large enough to spread the logits."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    dtype: torch.dtype = getattr(torch, overrides.pop("dtype", "float32"))
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**TINY, "initializer_range": 0.1, **overrides})).to(dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


class CountingSource(LocalSource):
    """The side that has the files; `asked` are the bytes of each answer."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.asked: list[int] = []

    def rows(self, name: str, first: int, count: int) -> bytes:
        payload = super().rows(name, first, count)
        self.asked.append(len(payload))
        return payload
