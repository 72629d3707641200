"""Decode rates of moeray, in several settings, against transformers' `generate`, in turn on the same machine.

    python -m benchmarks.compare --model DIRECTORY --rounds 3 --json result.json

Contestants run one after the other in every round (A B C A B C ...), so that a slow moment of the machine hits all of
them; each keeps its model loaded while the others run. moeray is measured over HTTP with `benchmarks/serve.py`'s
streams: tokens/s is the batch over the median time between two tokens of a stream. transformers has its own time for
the prompt taken off: batch x (N - 1) / (time for N tokens - time for 1). Prompts are random tokens, greedy, fp32.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.deployment import Deployment
from benchmarks.serve import Plan, report, run_all

SETTINGS: dict[str, list[str]] = {
    "1 worker x 2 threads, fast": ["--workers", "1", "--threads", "2", "--combine", "fast"],
    "1 worker x 2 threads, exact": ["--workers", "1", "--threads", "2", "--combine", "exact"],
    "2 workers x 1 thread, fast": ["--workers", "2", "--threads", "1", "--combine", "fast"],
    "2 workers x 1 thread, exact": ["--workers", "2", "--threads", "1", "--combine", "exact"],
}


class Contestant(Protocol):
    """Something that decodes; `decode_rate` is in tokens per second over the whole batch."""

    def decode_rate(self, batch: int, prompt_len: int, output_len: int, seed: int) -> float: ...


class Transformers:
    """`generate` of the pinned transformers, with 2 threads, in this process."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(2)
        self.torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def decode_rate(self, batch: int, prompt_len: int, output_len: int, seed: int) -> float:
        self.torch.manual_seed(seed)
        prompts = self.torch.randint(0, self.model.config.vocab_size, (batch, prompt_len))
        one, all_of_them = (self._seconds(prompts, count) for count in (1, output_len))
        return batch * (output_len - 1) / (all_of_them - one)

    def _seconds(self, prompts: Any, num_tokens: int) -> float:
        started = time.perf_counter()
        with self.torch.inference_mode():
            self.model.generate(
                prompts, do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens, pad_token_id=0
            )
        return time.perf_counter() - started


class Moeray:
    """A `moeray serve` of its own on a free port."""

    def __init__(self, model: Path, arguments: Sequence[str], vocab_size: int, log: Path) -> None:
        self.deployment = Deployment(str(model), ["--max-model-len", "1024", "--kv-cache-gib", "0.5", *arguments], log)
        self.vocab_size = vocab_size

    def decode_rate(self, batch: int, prompt_len: int, output_len: int, seed: int) -> float:
        plan = Plan(
            url=self.deployment.url,
            endpoint="generate",
            model=None,
            api_key=None,
            num_requests=batch,
            concurrency=batch,
            prompt_len=(prompt_len, prompt_len),
            output_len=(output_len, output_len),
            token_ids=(0, self.vocab_size),
            temperature=0.0,
            seed=seed,
            request_timeout_s=600.0,
            total_timeout_s=900.0,
        )
        outcomes, wall_s = asyncio.run(run_all(plan))
        result = report(plan, outcomes, wall_s, 0.0)
        if result["failed"]:
            raise RuntimeError(f"{result['failed']} requests failed: {result}")
        return float(1000.0 * batch / result["itl_ms"]["p50"])


def others_cpu_share() -> float:
    """How many cores everything but this process used over the last half second."""
    me = psutil.Process()
    before, mine = psutil.cpu_times(), me.cpu_times()
    time.sleep(0.5)
    after, mine_after = psutil.cpu_times(), me.cpu_times()
    busy = sum(after[:3]) - sum(before[:3]) - (mine_after.user - mine.user) - (mine_after.system - mine.system)
    return float(busy / 0.5)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    vocab_size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contestants: dict[str, Contestant] = {"transformers": Transformers(arguments.model)}
        for number, name in enumerate(arguments.settings):
            server = Moeray(arguments.model, SETTINGS[name], vocab_size, logs / f"{number}.log")
            stack.callback(server.deployment.close)
            server.deployment.wait_ready()
            contestants[name] = server
        rates = measure(contestants, arguments)
    table(rates, arguments.batches)
    if arguments.json:
        named = {name: {str(batch): values for batch, values in by_batch.items()} for name, by_batch in rates.items()}
        arguments.json.write_text(json.dumps({"cpus": os.cpu_count(), "tokens_per_s": named}, indent=1))
    return 0


def measure(contestants: dict[str, Contestant], arguments: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Rates by contestant and batch, one for each round."""
    rates: dict[str, dict[int, list[float]]] = {name: {b: [] for b in arguments.batches} for name in contestants}
    for number in range(arguments.rounds):
        print(f"round {number + 1}: other processes use {others_cpu_share():.2f} cores", flush=True)
        for batch in arguments.batches:
            for name, contestant in contestants.items():
                rate = contestant.decode_rate(batch, arguments.prompt_len, arguments.output_len, seed=number)
                rates[name][batch].append(rate)
                print(f"  batch {batch:3}  {name:28} {rate:7.1f} tokens/s", flush=True)
    return rates


def table(rates: dict[str, dict[int, list[float]]], batches: Sequence[int]) -> None:
    """Median rates, and ratios to transformers round by round (median, minimum, maximum), as Markdown."""
    print("\n| decode tokens/s (ratio to transformers: median, min..max) | " + " | ".join(map(str, batches)) + " |")
    print("|---|" + "---|" * len(batches))
    for name, by_batch in rates.items():
        cells = []
        for batch in batches:
            ratios = [a / b for a, b in zip(by_batch[batch], rates["transformers"][batch], strict=True)]
            spread = f"{statistics.median(ratios):.2f}, {min(ratios):.2f}..{max(ratios):.2f}"
            cells.append(f"{statistics.median(by_batch[batch]):.1f} ({spread})")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    raise SystemExit(main())
