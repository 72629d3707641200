"""The training model: the mathematics of transformers' Qwen3MoeForCausalLM, at a pace one core can train.

Weights are fp32; matrix products run in `compute_dtype`. An expert sees its tokens as one contiguous slice,
and the output layer and its cross-entropy are one step, so that a batch's logits never exist at once.

Shapes: B batch, S sequence, T tokens (B*S), D hidden, E experts, K experts per token, R routed rows (T*K),
P seats (R and the padding of each expert), F expert intermediate, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_ROWS = 256
SEAT_ROWS = 64  # an expert's rows are padded to multiples of this: few shapes keep oneDNN's kernels cached


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The sizes; names as in transformers' Qwen3MoeConfig."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 96
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    router_aux_loss_coef: float = 0.01


class _Dispatch(torch.autograd.Function):
    """Token rows to their experts' seats; empty seats get zeros. The gradient is a gather, not a scatter."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, routed_at_P: Tensor, seat_of_TK: Tensor) -> Tensor:
        ctx.save_for_backward(seat_of_TK)
        padded = torch.cat((x_TD, x_TD.new_zeros(1, x_TD.shape[1])))
        return padded.index_select(0, routed_at_P // seat_of_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (seat_of_TK,) = ctx.saved_tensors
        return grads[0].index_select(0, seat_of_TK.flatten()).view(*seat_of_TK.shape, -1).sum(1), None, None


class _Collect(torch.autograd.Function):
    """The seats' rows back to [T, K, D]. An empty seat's gradient is arbitrary: its input row was zero, so it
    reaches no weight, and nobody gathers it."""

    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, routed_at_P: Tensor, seat_of_TK: Tensor) -> Tensor:
        ctx.save_for_backward(routed_at_P)
        return rows_PD.index_select(0, seat_of_TK.flatten()).view(*seat_of_TK.shape, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad_RD = grads[0].reshape(-1, grads[0].shape[-1])
        (routed_at_P,) = ctx.saved_tensors
        return grad_RD.index_select(0, routed_at_P.clamp(max=len(grad_RD) - 1)), None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of `hidden_TD @ weight_VD.T`; the forward pass makes both gradients."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, need_grad: bool) -> Tensor:
        grad_hidden_TD = torch.empty_like(hidden_TD) if need_grad else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if need_grad else None
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(targets_T), LOSS_ROWS):
            rows = slice(start, start + LOSS_ROWS)
            probs = (hidden_TD[rows] @ weight_VD.T).float()
            targets = targets_T[rows, None]
            target_logits = probs.gather(1, targets)
            peak = probs.amax(1, keepdim=True)
            norm = probs.sub_(peak).exp_().sum(1, keepdim=True)
            total += (norm.log() + peak - target_logits).sum(dtype=torch.float64)
            if grad_hidden_TD is not None and grad_weight_VD is not None:
                probs.div_(norm).scatter_add_(1, targets, torch.full_like(norm, -1.0))
                grad = probs.to(weight_VD.dtype)
                torch.mm(grad, weight_VD, out=grad_hidden_TD[rows])
                grad_weight_VD += grad.T @ hidden_TD[rows]
        if need_grad:
            ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
        return total.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        scale = grads[0]
        return grad_hidden_TD * scale.to(grad_hidden_TD.dtype), (grad_weight_VD * scale), None, None


class Block(nn.Module):
    """Attention and experts of one layer. Returns the new residual stream and this layer's balance loss;
    `last_counts_E` says how many rows each expert got meanwhile."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = c = config
        std, out_std = c.initializer_range, c.initializer_range / (2 * c.num_hidden_layers) ** 0.5
        query_dim, kv_dim = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.qkv_proj = _weight(query_dim + 2 * kv_dim, c.hidden_size, std=std)
        self.o_proj = _weight(c.hidden_size, query_dim, std=out_std)
        self.gate = _weight(c.num_experts, c.hidden_size, std=std)
        self.w13_EFD = _weight(c.num_experts, 2 * c.moe_intermediate_size, c.hidden_size, std=std)
        self.w2_EDF = _weight(c.num_experts, c.hidden_size, c.moe_intermediate_size, std=out_std)
        self.input_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.post_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.last_counts_E = torch.zeros(c.num_experts)

    def forward(self, hidden_TD: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        hidden_TD = hidden_TD + self._attention(self._norm(hidden_TD, self.input_norm), rope, dtype)
        mixed_TD, balance = self._experts(self._norm(hidden_TD, self.post_norm), dtype)
        return hidden_TD + mixed_TD, balance

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _attention(self, x_TD: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        c = self.config
        heads = [c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads]
        seq_len = rope[0].shape[0]
        qkv = F.linear(x_TD.to(dtype), self.qkv_proj.to(dtype)).float()
        q, k, v = torch.split(qkv.view(-1, seq_len, sum(heads), c.head_dim), heads, 2)
        q, k = (_rotate(self._norm(x, w), rope) for x, w in ((q, self.q_norm), (k, self.k_norm)))
        repeats = heads[0] // heads[1]
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(len(x_TD), -1)
        return F.linear(out.to(dtype), self.o_proj.to(dtype)).float()

    def _experts(self, x_TD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        c = self.config
        probs_TE = F.linear(x_TD, self.gate).softmax(-1)
        topk_weights_TK, topk_ids_TK = probs_TE.topk(c.num_experts_per_tok, -1)
        topk_weights_TK = topk_weights_TK / topk_weights_TK.sum(-1, keepdim=True)
        counts_E = torch.bincount(topk_ids_TK.flatten(), minlength=c.num_experts)
        seats_E = (counts_E + SEAT_ROWS - 1) // SEAT_ROWS * SEAT_ROWS
        self.last_counts_E = counts_E
        routed_at_P, seat_of_TK = _seats(topk_ids_TK, counts_E, seats_E)
        rows_PD: Tensor = _Dispatch.apply(x_TD.to(dtype), routed_at_P, seat_of_TK)  # type: ignore[no-untyped-call]
        outs = []
        rows = torch.split(rows_PD, seats_E.tolist())
        for x, w13, w2 in zip(rows, self.w13_EFD.to(dtype), self.w2_EDF.to(dtype), strict=True):
            gate, up = F.linear(x, w13).chunk(2, -1)
            outs.append(F.linear(F.silu(gate) * up, w2))
        out_TKD = _Collect.apply(torch.cat(outs), routed_at_P, seat_of_TK)  # type: ignore[no-untyped-call]
        mixed_TD = torch.bmm(topk_weights_TK.to(dtype).unsqueeze(1), out_TKD).squeeze(1).float()
        balance = c.num_experts * (probs_TE.mean(0) * (counts_E / len(x_TD))).sum()
        return mixed_TD, balance


class DemoModel(nn.Module):
    """A causal language model over batches of whole sequences; there is no cache, since it only trains."""

    def __init__(self, config: DemoConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.embed_tokens = _weight(config.vocab_size, config.hidden_size, std=config.initializer_range)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))

    def blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.layers))

    def hidden(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden states, [T, D], and the mean of the layers' balance losses (1.0 x K when even)."""
        c = self.config
        inverse_frequency = c.rope_theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.outer(torch.arange(ids_BS.shape[1]).float(), inverse_frequency).repeat(1, 2)[:, None]
        hidden_TD = F.embedding(ids_BS.flatten(), self.embed_tokens)
        balances = []
        for layer in self.blocks():
            hidden_TD, balance = layer(hidden_TD, (angles.cos(), angles.sin()), self.compute_dtype)
            balances.append(balance)
        return F.rms_norm(hidden_TD, self.norm.shape, self.norm, c.rms_norm_eps), torch.stack(balances).mean()

    def loss(self, ids_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats a token, and the balance loss."""
        hidden_TD, balance = self.hidden(ids_BS)
        total = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_TD.to(self.compute_dtype),
            self.embed_tokens.to(self.compute_dtype),
            targets_BS.flatten(),
            torch.is_grad_enabled(),
        )
        return total / targets_BS.numel(), balance


def _weight(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * std)


def _seats(topk_ids_TK: Tensor, counts_E: Tensor, seats_E: Tensor) -> tuple[Tensor, Tensor]:
    """Which routed row (index into the flat [T*K], or T*K for none) sits where, and where each one sits."""
    order_R = topk_ids_TK.flatten().argsort(stable=True)
    shift_E = (seats_E.cumsum(0) - seats_E) - (counts_E.cumsum(0) - counts_E)
    seats_R = torch.arange(len(order_R)) + shift_E.repeat_interleave(counts_E)
    routed_at_P = torch.full((int(seats_E.sum()),), len(order_R))
    routed_at_P[seats_R] = order_R
    seat_of_TK = torch.empty_like(order_R).scatter_(0, order_R, seats_R).view(topk_ids_TK.shape)
    return routed_at_P, seat_of_TK


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat((-second, first), -1) * rope[1]
