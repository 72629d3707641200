"""Loading takes no more private memory than what is kept, give or take a little. Measured in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeray.deploy.environment import worker_variables
from tests.support.checkpoints import save_qwen3_moe
from tests.support.quantized import fp8_config, save_quantized, to_fp8

ROOT = Path(__file__).resolve().parents[2]
PEAK_OVER_WEIGHTS = 1.15
# 100 MB in fp32, in the reference model's proportions.
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "vocab_size": 2048,
}


@pytest.mark.parametrize(
    "save",
    [
        lambda path: save_qwen3_moe(path, **SIZES, dtype="bfloat16", max_shard_size="20MB"),
        lambda path: save_quantized(path, to_fp8(128), fp8_config(128), **SIZES)[0],
    ],
    ids=["bf16 in shards", "fp8"],
)
def test_the_peak_of_loading_is_what_is_kept(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "loading.py"), str(save(tmp_path))]
    variables = worker_variables(threads=1, embedded=True, environ={})
    environment = os.environ | variables | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["weights_bytes"] > 25e6
    assert 0.9 < found["peak_over_weights"] <= PEAK_OVER_WEIGHTS, found
