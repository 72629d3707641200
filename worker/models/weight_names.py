"""How a family names its tensors on disk. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names of tensors in a checkpoint; the defaults are those that most families share.

    Per-layer names follow the prefix `layer.format(layer=...)`; expert names take `expert`.
    """

    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    layer: str = "model.layers.{layer}."
    input_norm: str = "input_layernorm.weight"
    post_norm: str = "post_attention_layernorm.weight"
    q: str = "self_attn.q_proj."
    k: str = "self_attn.k_proj."
    v: str = "self_attn.v_proj."
    o: str = "self_attn.o_proj."
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    dense_gate: str = "mlp.gate_proj.weight"
    dense_up: str = "mlp.up_proj.weight"
    dense_down: str = "mlp.down_proj.weight"
    router: str = "mlp.gate.weight"
    expert_gate: str = "mlp.experts.{expert}.gate_proj.weight"
    expert_up: str = "mlp.experts.{expert}.up_proj.weight"
    expert_down: str = "mlp.experts.{expert}.down_proj.weight"

    def expert_parts(self) -> tuple[tuple[str, str], ...]:
        """(part, name within the layer) of an expert's tensors; parts as `load_expert` of a method knows them."""
        return (("gate", self.expert_gate), ("up", self.expert_up), ("down", self.expert_down))
