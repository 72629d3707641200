"""How much memory a worker takes while it loads: its own, not the pages of the checkpoint that it looks at."""

import psutil
import torch


class LoadMemory:
    """Counts from its making on. Memory is seen when `sample` is called, on CUDA at any time.

    On a CPU that is anonymous memory: resident, and neither of a file nor shared. Pages of a memory map belong to the
    system's cache, which gives them up when somebody needs them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = self._taken()
        self._peak = self._before

    def sample(self) -> None:
        """Cheap: 20 microseconds."""
        self._peak = max(self._peak, self._taken())

    @property
    def peak_bytes(self) -> int:
        """The most that was taken at one time."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return self._peak - self._before

    def _taken(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        memory = self._process.memory_info()
        return int(memory.rss - getattr(memory, "shared", 0))
