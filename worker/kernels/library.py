"""The compiled matrix product: found once for each process, or not there at all.

Legend: M rows, I in, O out.
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# The best first, with torch's names for what the processor can do.
INSTRUCTION_SETS = (("avx512", ("AVX512",)), ("avx2", ("AVX2", "AVX512")))
FUNCTIONS = {
    torch.float32: "moeray_linear_f32",
    torch.float16: "moeray_linear_f16",
    torch.bfloat16: "moeray_linear_bf16",
    torch.int8: "moeray_linear_i8",
}
ARGUMENTS = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t),
)


class RowKernel:
    """y = x @ w.T, times a scale for each output, plus a bias; each row is summed in an order of its own.

    A row's bits depend neither on how many rows there are nor on the number of threads nor on the instruction set.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        self._functions: dict[torch.dtype, Callable[..., None]] = {}
        for dtype, name in FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = ARGUMENTS, None
            self._functions[dtype] = function

    @staticmethod
    def takes(x_MI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
        """fp32 rows on a CPU, and weights of fp32, fp16, bf16 or int8."""
        return x_MI.dtype == torch.float32 and weight_OI.dtype in FUNCTIONS and weight_OI.device.type == "cpu"

    def __call__(
        self,
        x_MI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None = None,
        scale_O: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """fp32 [M, O]; see `takes`. Bias and scale are fp32, and rows of weights and of x lie in one piece."""
        num_rows, length = x_MI.shape
        if x_MI.stride(-1) != 1:
            x_MI = x_MI.contiguous()
        assert weight_OI.shape[1] == length
        assert weight_OI.stride(1) == 1
        out_MO = x_MI.new_empty((num_rows, weight_OI.shape[0]))
        self._functions[weight_OI.dtype](
            x_MI.data_ptr(),
            x_MI.stride(0),
            weight_OI.data_ptr(),
            weight_OI.stride(0),
            None if scale_O is None else scale_O.data_ptr(),
            None if bias_O is None else bias_O.data_ptr(),
            out_MO.data_ptr(),
            out_MO.stride(0),
            num_rows,
            weight_OI.shape[0],
            length,
            torch.get_num_threads(),
        )
        return out_MO


def built_libraries() -> dict[str, Path]:
    """Those that were compiled at installation and that this processor can run, the best first."""
    capability = torch.backends.cpu.get_cpu_capability()
    found = {}
    for name, capabilities in INSTRUCTION_SETS:
        paths = [Path(__file__).with_name(f"gemm_{name}{suffix}") for suffix in EXTENSION_SUFFIXES]
        path = next((path for path in paths if path.is_file()), None)
        if path is not None and capability in capabilities:
            found[name] = path
    return found


@functools.cache
def row_kernel() -> RowKernel | None:
    """The best for this processor; None if none was compiled, or it cannot be loaded."""
    for path in built_libraries().values():
        try:
            return RowKernel(path)
        except OSError as error:
            logger.warning("%s cannot be loaded: %s", path, error)
    return None
