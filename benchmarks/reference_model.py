"""Writes the reference model of the benchmarks: a random Qwen3-MoE of 650 M parameters, fp32.

python benchmarks/reference_model.py DIRECTORY
"""

import argparse
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(arguments.seed)
    config = Qwen3MoeConfig(
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        vocab_size=8192,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(arguments.directory)
    save_tokenizer(arguments.directory)


def save_tokenizer(directory: Path) -> None:
    """Bytes as tokens 0 to 255: random weights have no words, but a server wants a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


if __name__ == "__main__":
    main()
