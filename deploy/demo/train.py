"""Trains the demo model from nothing on one CPU core within a time budget, and writes it with its card.

    python -m moeray.deploy.demo.train --cache CACHE --out deploy/demo/model --minutes 30

The learning rate follows the elapsed share of the budget, so a run of any length ends annealed.
"""

import argparse
import logging
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from moeray.deploy.demo import card, corpus, export
from moeray.deploy.demo.network import DemoConfig, DemoModel

logger = logging.getLogger(__name__)

HELD_OUT_EVERY = 50
NOVEL_REPEATS = 2
BATCH_TOKENS = 2048
SHORT_SEQ_LEN = 256
LONG_EVERY = 6
PEAK_LR = 2e-3
FINAL_LR_SHARE = 0.02
WARMUP_SHARE = 0.03
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
LOG_EVERY_STEPS = 50


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; every byte is a token, so that any text encodes, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(export.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each run, closed by the end-of-text token."""
    end_id = export.SPECIAL_TOKENS.index(export.END_OF_TEXT)
    return [[*encoding.ids, end_id] for encoding in tokenizer.encode_batch(texts)]


def batches(runs: list[list[int]], window: int, rng: random.Random) -> Iterator[Tensor]:
    """Endless batches of `BATCH_TOKENS` inputs, rows of window + 1 ids; epochs are cut at random offsets."""
    rows_per_batch = BATCH_TOKENS // window
    while True:
        order = rng.sample(runs, len(runs))
        stream = torch.tensor([i for run in order for i in run])
        rows = stream[rng.randrange(window) :].unfold(0, window + 1, window)
        picks = rng.sample(range(len(rows)), len(rows))
        for at in range(0, len(rows) - rows_per_batch + 1, rows_per_batch):
            yield rows[picks[at : at + rows_per_batch]]


def learning_rate(share: float) -> float:
    """Linear warm-up, then a cosine to `FINAL_LR_SHARE` of the peak; `share` of the budget has elapsed."""
    if share < WARMUP_SHARE:
        return PEAK_LR * max(share / WARMUP_SHARE, 0.01)
    cosine = 0.5 + 0.5 * math.cos(math.pi * min((share - WARMUP_SHARE) / (1 - WARMUP_SHARE), 1.0))
    return PEAK_LR * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def train(model: DemoModel, runs: list[list[int]], *, minutes: float, seed: int) -> tuple[int, float]:
    """Trains until the budget is spent; returns the steps done and the minutes they took."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=True)
    start, step, recent = time.monotonic(), 0, 0.0
    for ids in batches(runs, model.config.max_position_embeddings, random.Random(seed)):
        share = (time.monotonic() - start) / (60 * minutes)
        if share >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(share)
        inputs, targets = ids[:, :-1], ids[:, 1:]
        if step % LONG_EVERY:
            inputs, targets = inputs.reshape(-1, SHORT_SEQ_LEN), targets.reshape(-1, SHORT_SEQ_LEN)
        loss, balance = model.loss(inputs, targets)
        torch.autograd.backward(loss + model.config.router_aux_loss_coef * balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        recent += loss.detach().item()
        if step % LOG_EVERY_STEPS == 0:
            rate, mean = step * BATCH_TOKENS / (time.monotonic() - start), recent / LOG_EVERY_STEPS
            values = (step, 100 * share, mean, balance.item(), rate)
            logger.info("step %d, %.1f%%: loss %.4f, balance %.3f, %.0f tokens/s", *values)
            recent = 0.0
    return step, (time.monotonic() - start) / 60


@torch.no_grad()
def evaluate(model: DemoModel, runs: list[list[int]], seq_len: int) -> float:
    """Mean loss in nats a token over non-overlapping windows, each seen without what came before it."""
    rows = torch.tensor([i for run in runs for i in run]).unfold(0, seq_len + 1, seq_len)
    total, rows_per_batch = 0.0, BATCH_TOKENS // seq_len
    for at in range(0, len(rows), rows_per_batch):
        part = rows[at : at + rows_per_batch]
        total += model.loss(part[:, :-1], part[:, 1:])[0].item() * len(part)
    return total / len(rows)


@torch.no_grad()
def expert_load(model: DemoModel, runs: list[list[int]]) -> list[tuple[float, float]]:
    """Each layer's least and most used expert on `runs`, as multiples of the even share."""
    seq_len = model.config.max_position_embeddings
    rows = torch.tensor([i for run in runs for i in run]).unfold(0, seq_len + 1, seq_len)[:16]
    model.hidden(rows[:, :-1])
    shares = [layer.last_counts_E / layer.last_counts_E.float().mean() for layer in model.blocks()]
    return [(share.min().item(), share.max().item()) for share in shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cache", type=Path, required=True, help="folder for the downloaded packages")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--minutes", type=float, default=30.0, help="budget of the training loop")
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json instead of training one")
    parser.add_argument("--compute-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--hardware", default="one CPU core", help="words for the card")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    corpus.fetch(args.cache)
    texts = corpus.build(args.cache, held_out_every=HELD_OUT_EVERY)
    training_texts = texts.novels * NOVEL_REPEATS + texts.addresses
    config = DemoConfig()
    tokenizer_origin = "was trained on the training text"
    if args.tokenizer:
        tokenizer_origin = "comes from an earlier run over these texts, which held out other chunks"
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        tokenizer = train_tokenizer(training_texts, config.vocab_size)
    runs, held_out = encode(tokenizer, training_texts), encode(tokenizer, texts.held_out)
    num_epoch_tokens, num_held_out_tokens = sum(map(len, runs)), sum(map(len, held_out))
    logger.info("%d tokens an epoch, %d held out", num_epoch_tokens, num_held_out_tokens)

    model = DemoModel(config, getattr(torch, args.compute_dtype))
    num_steps, minutes = train(model, runs, minutes=args.minutes, seed=args.seed)
    _, max_rounding_error = export.to_fp16(model)
    export.round_to_fp16(model)
    model.compute_dtype = torch.float32
    held_out_loss = evaluate(model, held_out, config.max_position_embeddings)
    held_out_bytes = sum(len(text.encode()) for text in texts.held_out)
    result = card.Result(
        num_steps=num_steps,
        num_tokens=num_steps * BATCH_TOKENS,
        epochs=num_steps * BATCH_TOKENS / num_epoch_tokens,
        minutes=minutes,
        hardware=args.hardware,
        tokenizer_origin=tokenizer_origin,
        compute_dtype=args.compute_dtype,
        num_epoch_tokens=num_epoch_tokens,
        corpus_bytes=sum(len(text.encode()) for text in texts.novels + texts.addresses),
        num_held_out_tokens=num_held_out_tokens,
        held_out_loss=held_out_loss,
        held_out_loss_short=evaluate(model, held_out, SHORT_SEQ_LEN),
        bits_per_byte=held_out_loss / math.log(2) * num_held_out_tokens / held_out_bytes,
        max_rounding_error=max_rounding_error,
        expert_load=expert_load(model, held_out),
    )
    logger.info("%s", result)
    export.write(args.out, model, tokenizer, card.render(config, result))


if __name__ == "__main__":
    main()
