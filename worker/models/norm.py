"""Normalisation layers, with weights under the names of their places."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from moeray.worker.models.config import DecoderConfig
from moeray.worker.models.moe_layer import residual_scale
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.models.weights import Place
from moeray.worker.moe.factory import MoEEnvironment


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dim, computed in fp32 (Zhang and Sennrich 2019)."""
    hidden_f = hidden.float()
    scale = torch.rsqrt(hidden_f.square().mean(-1, keepdim=True) + eps)
    normed = (hidden_f * scale).to(hidden.dtype)
    return normed if weight is None else normed * weight


class Norm(nn.Module):
    """The norm of hidden states that a config asks for: root mean square, or LayerNorm with a bias.

    The residual stream's scale goes into the square of what is normed, so it goes into `eps`, too.
    """

    def __init__(self, config: DecoderConfig, environment: MoEEnvironment) -> None:
        super().__init__()
        self.eps = config.norm_eps * residual_scale(config, environment.dtype) ** 2
        self.weight = empty_parameter(config.hidden_size, dtype=environment.dtype, device=environment.device)
        self.bias = None
        if config.norm == "layer":
            self.bias = empty_parameter(config.hidden_size, dtype=environment.dtype, device=environment.device)

    def places(self, name: str, layer: int | None = None) -> Iterator[Place]:
        yield Place(name, self.weight.data, layer)
        if self.bias is not None:
            yield Place(f"{name}_bias", self.bias.data, layer)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return rms_norm(hidden, self.weight, self.eps)
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)
