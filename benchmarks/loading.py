"""What loading a checkpoint takes of a worker: seconds, and private memory against what is kept.

python benchmarks/loading.py DIRECTORY [--workers N] [--dtype fp32]

Measures one worker in this process, which is to be a fresh one. Prints one line of JSON.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from moeray.comm.placement import ExpertPlacement
from moeray.worker.config import WorkerConfig
from moeray.worker.loaded_model import load_model
from moeray.worker.models.registry import read_model_config


def measure(directory: Path, *, num_workers: int, dtype: str) -> dict[str, float]:
    """Load the part of the first of `num_workers`; bytes are of private memory, weights those that are kept."""
    torch.set_num_threads(1)
    config = read_model_config(directory)
    num_seats = -(-config.num_experts // num_workers)
    placement = ExpertPlacement.contiguous(
        num_layers=config.num_moe_layers,
        num_experts=config.num_experts,
        slots=range(num_workers),
        num_seats=num_seats,
    )
    worker = WorkerConfig(
        model_path=str(directory), num_seats=num_seats, max_workers=num_workers, dtype=dtype, kv_cache_bytes=1 << 28
    )
    started = time.monotonic()
    loaded = load_model(worker, placement, 0, lambda _: None)
    return {
        "load_s": time.monotonic() - started,
        "weights_bytes": loaded.weights_bytes,
        "peak_bytes": loaded.report.peak_bytes,
        "peak_over_weights": loaded.report.peak_bytes / loaded.weights_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--dtype", default="fp32")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.directory, num_workers=arguments.workers, dtype=arguments.dtype)))


if __name__ == "__main__":
    main()
