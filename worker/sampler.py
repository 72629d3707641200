"""From logits to tokens. Randomness depends on (seed, index, position) only, never on the batch or the worker.

Legend: S sequences that want a token, V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeray.worker.messages import SamplingParams
from moeray.worker.request import Sequence as RequestSequence


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token with, if asked for, its log probability and the best alternatives (id, log probability)."""

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that belongs to this place of this sequence (Philox, Salmon et al. 2011)."""
    generator = np.random.Philox(key=seed ^ (index << 64), counter=position)
    return float(np.random.Generator(generator).random())


class Sampler:
    """Samples each row on its own terms; plain greedy rows go in one call."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits_SV: torch.Tensor, sequences: Sequence[RequestSequence]) -> list[SampledToken]:
        """One token for each sequence from fp32 logits; the logits may be changed in place."""
        if not sequences:
            return []
        greedy = [row for row, seq in enumerate(sequences) if is_plain_greedy(seq)]
        tokens: list[SampledToken | None] = [None] * len(sequences)
        if greedy:
            best = logits_SV.argmax(dim=-1) if len(greedy) == len(sequences) else logits_SV[greedy].argmax(dim=-1)
            for row, token in zip(greedy, best.tolist(), strict=True):
                tokens[row] = SampledToken(token)
        return [
            token if token is not None else self._sample_row(logits_SV[row], sequences[row])
            for row, token in enumerate(tokens)
        ]

    def _sample_row(self, logits_V: torch.Tensor, sequence: RequestSequence) -> SampledToken:
        sampling = sequence.sampling
        log_probs_V = None if sampling.logprobs is None else torch.log_softmax(logits_V, dim=-1)
        adjusted_V = self._adjust(logits_V.clone() if log_probs_V is not None else logits_V, sequence)
        if sampling.temperature == 0.0:
            token = int(adjusted_V.argmax())
        else:
            position = sequence.num_output_tokens
            token = draw(adjusted_V, sampling, uniform(sampling.seed, sequence.index, position))
        if log_probs_V is None:
            return SampledToken(token)
        values, ids = log_probs_V.topk(min(sampling.logprobs or 0, len(log_probs_V)))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
        return SampledToken(token, float(log_probs_V[token]), top)

    def _adjust(self, logits_V: torch.Tensor, sequence: RequestSequence) -> torch.Tensor:
        """Penalties, bias and minimum length, in vLLM's order."""
        sampling = sequence.sampling
        if sequence.num_output_tokens < sampling.min_tokens:
            forbidden = list(sampling.stop_token_ids) + ([] if sampling.ignore_eos else list(self.eos_token_ids))
            logits_V[[token for token in forbidden if 0 <= token < len(logits_V)]] = float("-inf")
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(sequence.token_ids)), device=logits_V.device)
            values = logits_V[seen]
            penalty = sampling.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if (sampling.presence_penalty or sampling.frequency_penalty) and sequence.output_counts:
            ids = torch.tensor(list(sequence.output_counts), device=logits_V.device)
            counts = torch.tensor(list(sequence.output_counts.values()), dtype=torch.float32, device=logits_V.device)
            logits_V[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        for token, bias in sampling.logit_bias.items():
            logits_V[token] += bias
        return logits_V


def is_plain_greedy(sequence: RequestSequence) -> bool:
    """Whether the largest raw logit decides, and nobody asked for more."""
    sampling = sequence.sampling
    return (
        sampling.temperature == 0.0
        and sampling.logprobs is None
        and not sampling.logit_bias
        and sampling.repetition_penalty == 1.0
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
        and sequence.num_output_tokens >= sampling.min_tokens
    )


def draw(logits_V: torch.Tensor, sampling: SamplingParams, u: float) -> int:
    """The token at quantile `u` of the filtered distribution: temperature, then top-k, top-p and min-p.

    Candidates are ordered by probability, ties by id, so that the choice depends on this row's logits alone.
    """
    logits_V = logits_V / sampling.temperature
    if sampling.top_k and sampling.top_k < len(logits_V):
        kept, ids = torch.topk(logits_V, sampling.top_k)
    else:
        kept, ids = torch.sort(logits_V, descending=True, stable=True)
    probabilities = torch.softmax(kept.double(), dim=-1).cpu().numpy()
    count = len(probabilities)
    if sampling.top_p < 1.0:
        count = int(np.searchsorted(np.cumsum(probabilities), sampling.top_p)) + 1
    if sampling.min_p > 0.0:
        count = min(count, int(np.count_nonzero(probabilities >= sampling.min_p * probabilities[0])))
    cumulative = np.cumsum(probabilities[: max(1, count)])
    chosen = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(ids[min(chosen, len(cumulative) - 1)])
