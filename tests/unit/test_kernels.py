"""The compiled matrix product: right, with the same bits for a row whatever surrounds it, and not needed."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moeray.worker.kernels import library
from moeray.worker.kernels.library import FUNCTIONS, RowKernel, built_libraries, row_kernel
from moeray.worker.models.linear import RowLinear

LIBRARIES = [pytest.param(path, id=name) for name, path in built_libraries().items()]
DTYPES = list(FUNCTIONS)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 31, 64, 100)
# (inputs, outputs): multiples of the lanes and of the tiles, and neither.
SHAPES = ((16, 8), (1024, 64), (200, 37), (48, 5), (7, 1), (513, 100))


def weights(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (outputs, inputs), dtype=dtype)
    return torch.randn(outputs, inputs).to(dtype)


def test_a_machine_with_a_compiler_has_a_kernel() -> None:
    if shutil.which("g++") and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert row_kernel() is not None, "make setup did not compile worker/kernels/gemm.cpp"


@pytest.mark.parametrize("path", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_products_are_right_and_a_rows_bits_its_own(path: Path, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    torch.manual_seed(inputs)
    kernel, weight, x = RowKernel(path), weights(outputs, inputs, dtype), torch.randn(max(ROWS), inputs)
    bias, scale = torch.randn(outputs), torch.rand(outputs) + 0.5
    expected = x.double() @ weight.double().T
    whole = kernel(x, weight)
    size = x.abs().double() @ weight.abs().double().T
    assert ((whole - expected).abs() / size).max() < 1e-6
    biased = kernel(x, weight, bias, scale)
    assert torch.equal(biased, whole * scale + bias)
    for count in ROWS:
        assert torch.equal(kernel(x[-count:], weight), whole[-count:]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_give_the_same_bits(dtype: torch.dtype) -> None:
    kernels = [RowKernel(path) for path in built_libraries().values()]
    x, weight = torch.randn(9, 333), weights(50, 333, dtype)
    assert len({tuple(kernel(x, weight).flatten().tolist()) for kernel in kernels}) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_weights_give_the_bits_of_the_same_numbers_in_fp32(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 200), weights(64, 200, dtype)
    for path in built_libraries().values():
        kernel = RowKernel(path)
        assert torch.equal(kernel(x, weight), kernel(x, weight.float()))


@pytest.mark.parametrize("path", LIBRARIES)
def test_threads_and_strides_change_nothing(path: Path) -> None:
    kernel, x, weight = RowKernel(path), torch.randn(20, 700), torch.randn(1000, 700)
    alone = kernel(x, weight)
    wide = torch.zeros(20, 900)
    wide[:, 100:800] = x
    assert torch.equal(kernel(wide[:, 100:800], weight), alone)
    assert torch.equal(kernel(x.T.contiguous().T, weight), alone)
    num_threads = torch.get_num_threads()
    try:
        for count in (2, 3, 5):
            torch.set_num_threads(count)
            assert torch.equal(kernel(x, weight), alone), count
            assert torch.equal(kernel(x[:1], weight), alone[:1]), count
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("path", LIBRARIES)
def test_no_rows_and_no_inputs_are_no_trouble(path: Path) -> None:
    kernel = RowKernel(path)
    assert kernel(torch.zeros(0, 8), torch.zeros(5, 8)).shape == (0, 5)
    assert torch.equal(kernel(torch.zeros(2, 0), torch.zeros(3, 0), torch.ones(3)), torch.ones(2, 3))


def test_without_a_kernel_rows_are_padded_and_as_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert built_libraries() == {}
    linear = RowLinear(True, kernel=None)
    x, weight = torch.randn(600, 200), torch.randn(64, 200)
    assert linear.pads(x, weight)
    whole = linear(x, weight)
    assert torch.allclose(whole, F.linear(x, weight), atol=1e-3)
    for count in (1, 2, 3, 5, 31, 100):
        assert torch.equal(linear(x[-count:], weight), whole[-count:]), count


def test_a_library_that_cannot_be_loaded_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "gemm.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "built_libraries", lambda: {"avx2": broken})
    assert row_kernel.__wrapped__() is None


def test_other_types_go_to_torch() -> None:
    linear = RowLinear(True)
    x = torch.randn(3, 32)
    assert linear.pads(x.bfloat16(), torch.randn(8, 32).bfloat16())
    assert linear(x.bfloat16(), torch.randn(8, 32).bfloat16()).dtype == torch.bfloat16
