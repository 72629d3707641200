"""What this machine could do at best: bandwidth of memory, rate of large products, and the floor of a decode step.

    python -m benchmarks.floor --model DIRECTORY --batches 1 8 32 --context 160

A step must read each weight that it touches once. With B tokens that choose K of E experts evenly, E (1 - (1 - K/E)^B)
experts of a layer are touched; to that come the dense weights and the keys and values of all contexts. The floor is
those bytes over the bandwidth, or the products over their rate, whichever takes longer. Prints Markdown and writes it
into its section of RESULTS.md.
"""

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.results import Section
from moeray.worker.models.config import ModelConfig
from moeray.worker.models.registry import read_model_config

STREAM_BYTES = 256 << 20
SGEMM_SIZE = 1536
TRIES = 7


def fastest_s(work: Callable[[], object], tries: int = TRIES) -> float:
    """The shortest of some runs: what others on the machine take away is not the machine's limit."""
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def on_threads(count: int, work: Callable[[], object]) -> Callable[[], None]:
    """The same work on so many threads at once."""

    def all_of_it() -> None:
        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return all_of_it


def stream_rate(num_threads: int) -> float:
    """Bytes per second that a sum over memory reads, all threads together; each has an array of its own."""
    torch.set_num_threads(1)
    arrays = [torch.ones(STREAM_BYTES // 4) for _ in range(num_threads)]
    waiting = list(arrays)

    def read() -> None:
        waiting.pop().sum()

    def all_of_it() -> None:
        waiting.extend(arrays)
        on_threads(num_threads, read)()

    waiting.clear()
    return num_threads * STREAM_BYTES / fastest_s(all_of_it)


def sgemm_rate(num_threads: int) -> float:
    """Floating-point operations per second of a large product in fp32."""
    torch.set_num_threads(num_threads)
    a, b = (torch.randn(SGEMM_SIZE, SGEMM_SIZE) for _ in range(2))
    return 2 * SGEMM_SIZE**3 / fastest_s(lambda: torch.mm(a, b))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a decode step has to read and to compute; `weights` are numbers, not bytes."""

    weights: float
    cached: float
    operations: float

    def floor_s(self, weight_bytes: int, bytes_per_s: float, flops: float) -> float:
        """Seconds, for weights of so many bytes each; keys and values are fp32."""
        return max((self.weights * weight_bytes + self.cached * 4) / bytes_per_s, self.operations / flops)


def decode_step(config: ModelConfig, *, dense: float, cached_per_token: int, batch: int, context: int) -> Step:
    """`dense` numbers are read whatever the tokens are, the output head included."""
    moe = config.moe
    expert = 3 * config.hidden_size * moe.intermediate_size
    touched = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** batch)
    num_layers = len(moe.layers)
    return Step(
        weights=dense + num_layers * touched * expert,
        cached=batch * context * cached_per_token,
        operations=2 * batch * (dense + num_layers * moe.top_k * expert + 2 * context * cached_per_token),
    )


def dense_weights(model: Path, config: ModelConfig) -> tuple[float, int]:
    """Numbers that every step reads, and numbers that a token leaves in the cache."""
    from moeray.comm.exchange import ExpertExchange
    from moeray.worker.loader import Checkpoint
    from moeray.worker.models.registry import make_model
    from moeray.worker.moe.expert_load import ExpertLoad
    from moeray.worker.moe.factory import MoEEnvironment

    meta = torch.device("meta")
    environment = MoEEnvironment(
        exchange=ExpertExchange(combine="fast", dispatcher="auto", device=meta),
        expert_load=ExpertLoad(num_layers=len(config.moe.layers), num_experts=config.moe.num_experts),
        num_seats=1,
        dtype=torch.float32,
        weights_dtype=torch.float32,
        device=meta,
        row_exact=False,
    )
    served = make_model(config, Checkpoint(model).file_of.keys(), environment, 2)
    seats = sum(
        parameter.numel() for runner in served.moe_runners() for parameter in runner.routed_experts.parameters()
    )
    every = sum(p.numel() for p in served.parameters())
    embeddings = config.vocab_size * config.hidden_size
    is_tied = not any(target.source.names == ("lm_head.weight",) for target in served.weight_targets(None, 0))
    cached = sum(shape.numbers_per_token for shape in served.cache_shapes())
    return every - seats - (0 if is_tied else embeddings), cached


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--dry", action="store_true", help="print only, leave RESULTS.md as it is")
    arguments = parser.parse_args(argv)
    section = Section("floor")
    streams, products = ({count: rate(count) for count in (1, 2)} for rate in (stream_rate, sgemm_rate))
    section.add("| threads | memory, GB/s | fp32 products, GFLOP/s |", "|---|---|---|")
    for count in (1, 2):
        section.add(f"| {count} | {streams[count] / 1e9:.1f} | {products[count] / 1e9:.0f} |")
    config = read_model_config(arguments.model)
    dense, cached = dense_weights(arguments.model, config)
    best_stream, best_products = max(streams.values()), max(products.values())
    section.add("", f"Floor of a decode step, ms, at a context of {arguments.context} tokens, with both:", "")
    section.add("| batch | fp32 weights | fp16 | int8 |", "|---|---|---|---|")
    for batch in arguments.batches:
        step = decode_step(config, dense=dense, cached_per_token=cached, batch=batch, context=arguments.context)
        floors = [step.floor_s(size, best_stream, best_products) * 1e3 for size in (4, 2, 1)]
        section.add(f"| {batch} | " + " | ".join(f"{floor:.1f}" for floor in floors) + " |")
    if not arguments.dry:
        section.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
