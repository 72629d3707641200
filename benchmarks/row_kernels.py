"""Products of few rows: moeray's kernel against torch, and against what memory and the processor allow.

    python -m benchmarks.row_kernels --outputs 1024 --inputs 1024

One thread; as many weight matrices in turn as do not fit into any cache. Prints Markdown and writes it into its section
of RESULTS.md.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.floor import sgemm_rate, stream_rate
from benchmarks.results import Section
from moeray.worker.kernels.library import row_kernel
from moeray.worker.models.linear import RowLinear

TOTAL_BYTES = 96 << 20
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}


def seconds_each(products: dict[str, Callable[[int], object]], count: int, rounds: int) -> dict[str, float]:
    """The shortest time of one product of each kind, measured in turn over all matrices."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, product in products.items():
            began = time.perf_counter()
            for number in range(count):
                product(number)
            best[name] = min(best.get(name, float("inf")), (time.perf_counter() - began) / count)
    return best


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 16, 32, 64, 256])
    parser.add_argument("--outputs", type=int, default=1024)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="print only, leave RESULTS.md as it is")
    arguments = parser.parse_args(argv)
    kernel = row_kernel()
    if kernel is None:
        raise SystemExit("no kernel was compiled: see worker/kernels/library.py")
    bytes_per_s, flops = stream_rate(1), sgemm_rate(1)
    torch.set_num_threads(1)
    shape = (arguments.outputs, arguments.inputs)
    count = TOTAL_BYTES // (4 * shape[0] * shape[1])
    weights = {
        name: [(torch.randn(shape) * (20 if dtype == torch.int8 else 1)).to(dtype) for _ in range(count)]
        for name, dtype in DTYPES.items()
    }
    padded = RowLinear(True, kernel=None)
    section = Section("row kernels")
    section.add(
        f"{shape[0]} x {shape[1]} weights, one thread, {kernel.path.name.split('.')[0]}; memory "
        f"{bytes_per_s / 1e9:.1f} GB/s, large products {flops / 1e9:.0f} GFLOP/s.",
        "",
        "| rows | torch, padded rows, ms | fp32 ms | of the bandwidth | of the products' rate | fp16 ms | int8 ms |",
        "|---|---|---|---|---|---|---|",
    )
    for rows in arguments.rows:
        x = torch.randn(rows, arguments.inputs)
        products: dict[str, Callable[[int], object]] = {"torch": lambda i, x=x: padded(x, weights["fp32"][i])}  # type: ignore[misc]
        for name in DTYPES:
            products[name] = lambda i, x=x, name=name: kernel(x, weights[name][i])  # type: ignore[misc]
        took = seconds_each(products, count, arguments.rounds)
        size = shape[0] * shape[1]
        section.add(
            f"| {rows} | {took['torch'] * 1e3:.3f} | {took['fp32'] * 1e3:.3f} "
            f"| {4 * size / took['fp32'] / bytes_per_s:.0%} | {2 * rows * size / took['fp32'] / flops:.0%} "
            f"| {took['fp16'] * 1e3:.3f} | {took['int8'] * 1e3:.3f} |"
        )
    if not arguments.dry:
        section.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
