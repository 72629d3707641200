"""How many tokens each logical expert got, of late: what a balancer decides by.

Legend: L MoE layers, E experts, T tokens, K experts per token.
"""

import torch

from moeray.comm.messages import ExpertCounts

# After so many rows in a layer all counts are halved: what was popular long ago matters little.
ROWS_PER_HALVING = 65_536


class ExpertLoad:
    """Counts real tokens per logical expert. `record` is cheap; counts advance when the step is committed.

    One thread records and commits. `counts_LE` is replaced whole and never written to, so any thread may read it.
    """

    def __init__(self, *, num_layers: int, num_experts: int) -> None:
        self.counts_LE = torch.zeros((num_layers, num_experts), dtype=torch.int64)
        self._pending: dict[int, torch.Tensor] = {}
        self._num_rows = 0

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
            step_LE = torch.bincount(flat, minlength=self.counts_LE.numel()).view_as(self.counts_LE)
            num_rows = self._num_rows + max(len(ids_TK) for ids_TK in self._pending.values())
            num_halvings, self._num_rows = divmod(num_rows, ROWS_PER_HALVING)
            self.counts_LE = (self.counts_LE + step_LE) >> num_halvings
        self._pending.clear()

    def counts(self) -> ExpertCounts:
        """The counts of this moment, by layer and expert; from any thread."""
        return tuple(tuple(row) for row in self.counts_LE.tolist())
