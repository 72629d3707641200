"""Qwen3-MoE: config and weight names."""

from moeray.worker.models.config import ConfigReader, DecoderConfig, MoEConfig
from moeray.worker.models.family import Family
from moeray.worker.models.weight_names import WeightNames

ARCHITECTURE = "Qwen3MoeForCausalLM"


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map a Qwen3MoeConfig; raises `CheckpointError` by field for what is not implemented."""
    reader.require("use_sliding_window", False)
    reader.get("sliding_window", "max_window_layers")  # without effect while use_sliding_window is false
    reader.require("layer_types", None, ["full_attention"] * reader.integer("num_hidden_layers"))
    reader.require("hidden_act", "silu", "gelu", "gelu_pytorch_tanh")
    num_layers = reader.integer("num_hidden_layers")
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    sparse_step = reader.integer("decoder_sparse_step", default=1)
    dense_layers = set(reader.get("mlp_only_layers", default=[]))
    moe_layers = [layer for layer in range(num_layers) if layer not in dense_layers and (layer + 1) % sparse_step == 0]
    activation = reader.get("hidden_act", default="silu")
    return DecoderConfig(
        architecture=ARCHITECTURE,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=reader.integer("num_key_value_heads", default=num_heads),
        head_dim=reader.integer("head_dim", default=hidden_size // num_heads),
        vocab_size=reader.integer("vocab_size"),
        max_position_embeddings=reader.integer("max_position_embeddings", default=32768, low=2),
        rms_norm_eps=float(reader.get("rms_norm_eps", default=1e-6)),
        rope_theta=reader.rope_theta(),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", default=False)),
        attention_bias=bool(reader.get("attention_bias", default=False)),
        qk_norm=True,
        dense_intermediate_size=reader.integer("intermediate_size", default=6144),
        dense_activation=activation,
        checkpoint_dtype=str(reader.get("dtype", "torch_dtype", default="float32")),
        moe=MoEConfig(
            layers=tuple(moe_layers),
            num_experts=reader.integer("num_experts", "num_local_experts"),
            top_k=reader.integer("num_experts_per_tok"),
            intermediate_size=reader.integer("moe_intermediate_size"),
            renormalize=bool(reader.get("norm_topk_prob", default=False)),
            activation=activation,
        ),
        eos_token_ids=reader.eos_token_ids(),
        bos_token_id=reader.raw.get("bos_token_id"),
    )


FAMILY = Family(architecture=ARCHITECTURE, weight_names=WeightNames(), read_config=read_config)
