"""The load generator against a server whose answers are known."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "serve.py"


def run(url: str, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, str(SCRIPT), "--url", url, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("endpoint", ["generate", "completions"])
def test_counts_and_times(server: Any, endpoint: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    lengths = ("--prompt-len", "5:20", "--output-len", "7", "--token-ids", "1:500", "--json", str(path))
    load = ("--endpoint", endpoint, "--requests", "12", "--concurrency", "4")
    code, out, err = run(server.url, *load, *lengths)
    assert code == 0, err + out
    result = json.loads(path.read_text())
    assert result == json.loads(out)
    assert (result["completed"], result["failed"], result["output_tokens"]) == (12, 0, 84)
    for name in ("ttft_ms", "itl_ms", "tpot_ms"):
        numbers = result[name]
        assert 0 <= numbers["p50"] <= numbers["p90"] <= numbers["p95"] <= numbers["p99"] <= numbers["max"]
    assert 0 < result["ttft_at_worker_ms"]["worker_mean"] < result["ttft_ms"]["mean"]
    assert result["ttft_at_worker_ms"]["added_mean"] > 0


def test_errors_are_counted_and_named(server: Any) -> None:
    code, out, _ = run(server.url, "--requests", "3", "--output-len", "1000", "--token-ids", "1:500")
    assert code == 1
    result = json.loads(out)
    assert (result["completed"], result["failed"], result["ttft_ms"]) == (0, 3, None)
    assert "max_model_len" in result["errors"][0]


def test_a_run_ends_at_its_deadline(server: Any) -> None:
    for worker in server.workers:
        worker.is_paused = True
    try:
        code, out, _ = run(server.url, "--requests", "3", "--timeout-s", "0.5", "--token-ids", "1:500")
    finally:
        for worker in server.workers:
            worker.is_paused = False
    assert code == 1
    assert "not finished within 0.5 s" in json.loads(out)["errors"][0]


def test_bad_settings_are_named(server: Any) -> None:
    code, _, err = run(server.url, "--prompt-len", "9:3")
    assert code == 2
    assert "prompt_len is 9:3" in err
