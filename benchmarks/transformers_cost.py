"""What transformers' code costs a decode step: `python -m benchmarks.transformers_cost` on the demo model, one worker.

The same steps by the native family and through transformers, in turns; CPU time of the thread that steps, the least of
all rounds, so that other load changes little.
"""

import time
from pathlib import Path

import torch

from moeray.worker.batch import prepare_batch
from moeray.worker.messages import SamplingParams, Submit
from moeray.worker.request import Sequence
from tests.support.ranks import Rank, RankSet

MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo" / "model"
BATCHES = (1, 8, 32)
CONTEXT = 64
ROUNDS, STEPS = 12, 10


def start(rank: Rank, count: int) -> None:
    """Sequences that have computed their prompts."""
    sampling = SamplingParams(max_tokens=ROUNDS * STEPS + 2, temperature=0.0)
    for number in range(count):
        prompt = [(number + position * 7) % 500 for position in range(CONTEXT)]
        submit = Submit(
            lease=0, seq_id=f"{count}-{number}", attempt=0, index=0, prompt_ids=prompt, output_ids=[], sampling=sampling
        )
        rank.scheduler.add(Sequence.from_submit(submit, now=0.0))
    for _ in range(-(-count * CONTEXT // 512) + 1):
        step(rank)


def step(rank: Rank) -> float:
    """One step with token 1 for everybody; CPU seconds of the model's part."""
    batch = rank.scheduler.schedule()
    rank.loaded.exchange.begin_step([batch.num_tokens])
    prepared = prepare_batch(batch, rank.loaded.cache)
    began = time.thread_time()
    rank.loaded.model(prepared.forward, rank.loaded.cache)
    took = time.thread_time() - began
    rank.scheduler.commit(batch, [1] * len(prepared.sampled))
    return took


def main() -> None:
    torch.set_num_threads(1)
    for count in BATCHES:
        best: dict[str, float] = {}
        with (
            RankSet(MODEL, 1) as native,
            RankSet(MODEL, 1, model_impl="transformers") as through,
            torch.inference_mode(),
        ):
            ranks = {"native": native.ranks[0], "transformers": through.ranks[0]}
            for rank in ranks.values():
                start(rank, count)
            for _ in range(ROUNDS):
                for name, rank in ranks.items():
                    took = min(step(rank) for _ in range(STEPS))
                    best[name] = min(took, best.get(name, took))
        ratio = best["transformers"] / best["native"]
        times = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in best.items())
        print(f"batch {count}: {times}, {ratio:.2f} times")


if __name__ == "__main__":
    main()
