"""Which models moeray serves, and how: `python -m benchmarks.models_table` writes the table of docs/models.md.

Every causal language model with experts of the installed transformers is tried with a tiny random checkpoint in a
process of its own, under a time limit: logits and greedy tokens against transformers, on one worker and on three,
alone and with others, in chunks and with prefixes from the cache.
"""

import argparse
import multiprocessing
import queue
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Section
from benchmarks.tiny_models import expert_models, save_tiny, tiny_config
from moeray.comm.errors import CheckpointError
from moeray.worker.messages import SamplingParams
from moeray.worker.models.registry import FAMILIES, read_model_config
from tests.support.ranks import Generated, RankSet

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "models.md"
LIMIT_S = 180.0
TOLERANCE = 1e-3
GREEDY = SamplingParams(max_tokens=32, temperature=0.0)
LENGTHS = (1, 7, 40, 100, 70, 90)
NUM_SHARED = 48


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `way` is native, transformers, refused or wrong."""

    architecture: str
    way: str
    why: str


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Random prompts; the long ones begin alike, so that prefixes are used again."""
    rng = random.Random(1)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]
    longest = max(prompts, key=len)
    return [longest[:NUM_SHARED] + prompt[NUM_SHARED:] if len(prompt) > NUM_SHARED else prompt for prompt in prompts]


def worst_difference(directory: Path, prompts: list[list[int]], found: list[Generated]) -> float:
    """The largest difference of logits from transformers'; raises `ValueError` if a greedy token is another."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    worst = 0.0
    for prompt, ours in zip(prompts, found, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt + ours.tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        worst = max(worst, float((theirs - ours.logits).abs().max()))
        if theirs.argmax(-1).tolist() != ours.tokens:
            raise ValueError(f"greedy tokens differ after a prompt of {len(prompt)} tokens, logits by {worst:.1e}")
    return worst


def compare(directory: Path, **overrides: Any) -> str:
    """All checks of one checkpoint; returns what to say of it. Raises `ValueError` for a wrong answer."""
    with RankSet(directory, 1, prefix_caching=False, **overrides) as ranks:
        prompts = prompts_of(ranks.ranks[0].loaded.model.config.vocab_size)
        alone = [ranks.generate([prompt], GREEDY)[0] for prompt in prompts]
    worst = worst_difference(directory, prompts, alone)
    if worst > TOLERANCE:
        raise ValueError(f"logits differ by {worst:.1e}")
    is_exact = True
    for size, settings in ((1, {}), (3, {"max_num_batched_tokens": 40})):
        with RankSet(directory, size, **settings, **overrides) as ranks:
            results = ranks.generate(prompts, GREEDY), ranks.generate(prompts, GREEDY)
        for ours, reference in zip((*results[0], *results[1]), alone * 2, strict=True):
            if ours.tokens != reference.tokens or (ours.logits - reference.logits).abs().max() > TOLERANCE:
                raise ValueError(f"answers on {size} workers differ from those alone on one")
            is_exact &= torch.equal(ours.logits, reference.logits)
    return f"logits within {worst:.0e}" + ("" if is_exact else "; bits depend on the batch")


def try_model(model_type: str, architecture: str, rows: "multiprocessing.Queue[Row]") -> None:
    """Put the model's row on the queue."""
    torch.set_num_threads(1)
    way = "native" if architecture in FAMILIES else "transformers"
    with tempfile.TemporaryDirectory() as directory:
        try:
            config = tiny_config(model_type)
            config.architectures = [architecture]
            config.save_pretrained(directory)
            read_model_config(directory)  # what is refused by it needs no checkpoint
            row = Row(architecture, way, compare(save_tiny(model_type, Path(directory))))
        except CheckpointError as error:
            row = Row(
                architecture,
                "refused",
                str(error).removeprefix(f"{directory}/config.json: ").removeprefix(f"{directory}: "),
            )
        except Exception as error:  # noqa: BLE001 - reported in the table
            row = Row(architecture, "wrong", f"{type(error).__name__}: {error}")
        rows.put(row)


def row_of(model_type: str, architecture: str) -> Row:
    """Try it in a process of its own."""
    context = multiprocessing.get_context("fork")
    rows: multiprocessing.Queue[Row] = context.Queue()
    process = context.Process(target=try_model, args=(model_type, architecture, rows))
    process.start()
    try:
        row = rows.get(timeout=LIMIT_S)
    except queue.Empty:
        row = Row(architecture, "wrong", f"no answer within {LIMIT_S:.0f} s, exit code {process.exitcode}")
    process.kill()
    process.join()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", help="only these, and leave the document as it is")
    wanted = parser.parse_args().model_types
    import transformers
    import transformers.modeling_utils  # once, before the processes fork

    section = Section("models")
    section.add("| architecture | served by | |", "|---|---|---|")
    rows: dict[str, Row] = {}
    for model_type, architecture in expert_models().items():
        if wanted and model_type not in wanted:
            continue
        rows[architecture] = row = row_of(model_type, architecture)
        section.add(f"| {row.architecture} | {row.way} | {' '.join(row.why.replace('|', '/').split())} |")
    ways = [row.way for row in rows.values()]
    counts = ", ".join(f"{ways.count(way)} {way}" for way in ("native", "transformers", "refused", "wrong"))
    section.add("", f"transformers {transformers.__version__}: {counts}.")
    if not wanted:
        section.write(DOCUMENT)
    sys.exit(1 if "wrong" in ways else 0)


if __name__ == "__main__":
    main()
