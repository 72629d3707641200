"""How many tokens each logical expert got: what a balancer decides by.

Legend: L MoE layers, E experts, T tokens, K experts per token.
"""

import torch


class ExpertLoad:
    """Counts real tokens per logical expert. `record` is cheap; counts advance when the step is committed."""

    def __init__(self, *, num_layers: int, num_experts: int) -> None:
        self.counts_LE = torch.zeros((num_layers, num_experts), dtype=torch.int64)
        self._pending: dict[int, torch.Tensor] = {}

    def record(self, layer: int, topk_ids_TK: torch.Tensor) -> None:
        """Remember this step's choice for a layer; a step that runs again replaces it."""
        self._pending[layer] = topk_ids_TK

    def discard(self) -> None:
        """The step will not be committed: what it recorded does not count."""
        self._pending.clear()

    def commit(self) -> None:
        """The step is done: its tokens count."""
        num_experts = self.counts_LE.shape[1]
        layers = [ids.reshape(-1) + layer * num_experts for layer, ids in self._pending.items() if ids.numel()]
        if layers:
            flat = torch.cat(layers).cpu()
            self.counts_LE += torch.bincount(flat, minlength=self.counts_LE.numel()).view_as(self.counts_LE)
        self._pending.clear()
