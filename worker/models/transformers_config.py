"""What the system needs to know of a model that transformers implements, from config.json alone.

Neither torch nor transformers is imported: the command line reads it too. The model itself is made from the whole
config.json later (`transformers_skeleton.py`), and must have the experts that are found here.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from moeray.comm.errors import CheckpointError
from moeray.worker.models.config import ModelConfig, MoEConfig
from moeray.worker.models.config_reader import ConfigReader

NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layers")
HIDDEN = ("hidden_size", "d_model")
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts")
INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
MAX_POSITIONS = ("max_position_embeddings", "model_max_length", "max_seq_len")
# How many layers at the start have no experts.
NUM_DENSE = ("first_k_dense_replace", "num_dense_layers")
SPARSE_TYPES = ("sparse", "moe")
ATTENTION_TYPES = ("full_attention", "sliding_attention")
# Keys of layers that keep a state of their own beside keys and values.
STATE_PREFIXES = ("mamba_", "ssm_", "conv_L", "cca_time")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """`directory` has the config.json that transformers makes the model from."""

    directory: Path


def read_transformers_config(reader: ConfigReader) -> TransformersConfig:
    """Raises `CheckpointError` for what has no experts, and for what can be seen not to be served."""
    architecture = str(reader.raw["architectures"][0])
    _check_served(reader, architecture)
    num_layers = reader.integer(_present(reader, "number of layers", NUM_LAYERS))
    num_experts = reader.integer(_present(reader, "number of experts", NUM_EXPERTS))
    return TransformersConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=reader.integer(_present(reader, "hidden size", HIDDEN)),
        vocab_size=reader.integer("vocab_size"),
        max_position_embeddings=reader.integer(_present(reader, "number of positions", MAX_POSITIONS), low=2),
        checkpoint_dtype=str(reader.get("dtype", "torch_dtype", default="float32")),
        eos_token_ids=reader.eos_token_ids(),
        bos_token_id=reader.raw.get("bos_token_id"),
        moe=MoEConfig(
            layers=sparse_layers(reader, num_layers),
            num_experts=num_experts,
            top_k=reader.integer(_present(reader, "number of experts per token", TOP_K)),
            intermediate_size=reader.integer(_present(reader, "size of an expert", INTERMEDIATE)),
        ),
        directory=reader.path.parent,
    )


def _check_served(reader: ConfigReader, architecture: str) -> None:
    if not architecture.endswith("ForCausalLM") or "text_config" in reader.raw:
        raise CheckpointError(
            f"{reader.path}: architecture {architecture!r} is not supported: "
            "through transformers only text models of their own, named ...ForCausalLM and without a text_config"
        )
    if reader.get("quantization_config") is not None:
        raise CheckpointError(
            f"{reader.path}: quantization_config is not implemented for models that go through transformers"
        )
    stateful = sorted(key for key in reader.raw if key.startswith(STATE_PREFIXES))
    if stateful:
        raise CheckpointError(f"{reader.path}: {stateful[0]} says that layers keep a state, which is not implemented")
    types = reader.get("layer_types", default=())
    others = sorted({kind for kind in types if kind not in ATTENTION_TYPES})
    if others:
        raise CheckpointError(
            f"{reader.path}: layer_types has {', '.join(others)}, which is not implemented through transformers "
            f"(supported: {', '.join(ATTENTION_TYPES)})"
        )
    if not is_known_to_transformers(architecture):
        raise CheckpointError(
            f"{reader.path}: architecture {architecture!r} is not supported: it is not native, and the installed "
            "transformers does not know it"
        )


def is_known_to_transformers(architecture: str) -> bool:
    """Looks the name up in the text of transformers' table of models, because importing it takes seconds."""
    found = importlib.util.find_spec("transformers")
    folders = found.submodule_search_locations if found is not None else None
    if not folders:
        return False
    table = Path(folders[0]) / "models" / "auto" / "modeling_auto.py"
    return not table.is_file() or f'"{architecture}"' in table.read_text()


def _present(reader: ConfigReader, what: str, names: tuple[str, ...]) -> str:
    for name in names:
        if reader.get(name) is not None:
            return name
    raise CheckpointError(f"{reader.path}: {reader.raw['architectures'][0]} names no {what} ({', '.join(names)})")


def sparse_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """The layers with experts, by whichever of the keys in use the config has; all layers without any."""
    layers = range(num_layers)
    kinds = reader.get("mlp_layer_types")
    if kinds is not None:
        return tuple(layer for layer, kind in zip(layers, kinds, strict=False) if kind in SPARSE_TYPES)
    if reader.get("moe_layer_start_index") is not None:
        first, last = reader.integer("moe_layer_start_index", low=0), reader.get("moe_layer_end_index", default=-1)
        step = reader.integer("moe_layer_interval", default=1)
        last = num_layers - 1 if last < 0 else last
        return tuple(layer for layer in layers if first <= layer <= last and (layer + 1) % step == 0)
    frequency = reader.get("moe_layer_freq", default=1)
    if isinstance(frequency, list):
        return tuple(layer for layer, is_sparse in zip(layers, frequency, strict=False) if is_sparse)
    dense = set(reader.get("mlp_only_layers", default=()))
    step = reader.integer("decoder_sparse_step", default=1)
    num_dense = reader.integer(*NUM_DENSE, default=0, low=0)
    return tuple(
        layer
        for layer in layers
        if layer >= num_dense and layer % frequency == 0 and layer not in dense and (layer + 1) % step == 0
    )
