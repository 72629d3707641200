"""Sampling: filters, penalties, log probabilities, and randomness that belongs to (seed, index, position)."""

import math
from collections import Counter

import pytest
import torch

from moeray.worker.messages import SamplingParams, Submit
from moeray.worker.request import Sequence
from moeray.worker.sampler import Sampler, draw, uniform

EOS = 3


def make(
    prompt: list[int] | None = None, output: list[int] | None = None, index: int = 0, **fields: object
) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 100, **fields})  # type: ignore[arg-type]
    return Sequence.from_submit(
        Submit(
            lease=0,
            seq_id="s",
            attempt=0,
            index=index,
            prompt_ids=prompt or [1],
            output_ids=output or [],
            sampling=sampling,
        ),
        now=0.0,
    )


def sample(logits: list[float], sequence: Sequence) -> int:
    return Sampler((EOS,)).sample(torch.tensor([logits]), [sequence])[0].token_id


def test_nothing_to_sample() -> None:
    assert Sampler(()).sample(torch.zeros((0, 8)), []) == []


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    assert sample([0.0, 2.0, 2.0, 1.0], make(temperature=0.0)) == 1


def test_a_row_does_not_depend_on_the_batch_around_it() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 500)
    sequences = [make(temperature=0.8, seed=seed, top_p=0.9) for seed in range(5)] + [make(temperature=0.0)]
    together = Sampler(()).sample(logits.clone(), sequences)
    alone = [Sampler(()).sample(logits[row : row + 1].clone(), [seq])[0] for row, seq in enumerate(sequences)]
    assert together == alone


def test_randomness_depends_on_seed_index_and_position_only() -> None:
    values = {uniform(seed, index, position) for seed in (0, 1, 2**62) for index in (0, 1) for position in range(50)}
    assert len(values) == 300
    assert all(0.0 <= value < 1.0 for value in values)
    assert uniform(5, 1, 2) == uniform(5, 1, 2)
    continued = make(output=[4, 5], seed=9)
    fresh = make(seed=9)
    fresh.append(4)
    fresh.append(5)
    logits = [0.1 * value for value in range(50)]
    assert sample(logits, continued) == sample(logits, fresh)


def test_samples_follow_the_distribution() -> None:
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    seen = Counter(sample(logits, make(seed=seed)) for seed in range(3000))
    assert seen[0] / 3000 == pytest.approx(0.5, abs=0.04)
    assert seen[1] / 3000 == pytest.approx(0.3, abs=0.04)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.75}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"top_k": 1, "temperature": 50.0}, {0}),
        ({"top_k": 3, "top_p": 0.5}, {0}),
    ],
)
def test_filters_keep_the_likely_tokens(fields: dict[str, object], allowed: set[int]) -> None:
    logits = torch.tensor([math.log(p) for p in (0.5, 0.3, 0.12, 0.08)])
    sampling = SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]
    assert {draw(logits, sampling, step / 200) for step in range(200)} == allowed


def test_repetition_penalty_covers_prompt_and_output() -> None:
    sequence = make(prompt=[0], output=[1], temperature=0.0, repetition_penalty=2.0)
    assert sample([3.0, 2.9, 1.6, 0.0], sequence) == 2
    assert sample([-1.0, -1.0, -1.5, -9.0], sequence) == 2


def test_presence_and_frequency_cover_the_output_only() -> None:
    assert sample([2.0, 1.5, 0.0, 0.0], make(prompt=[0, 0], temperature=0.0, presence_penalty=1.0)) == 0
    assert sample([2.0, 1.5, 0.0, 0.0], make(output=[0], temperature=0.0, presence_penalty=1.0)) == 1
    assert sample([2.0, 1.5, 0.0, 0.0], make(output=[0], temperature=0.0, frequency_penalty=0.4)) == 0
    assert sample([2.0, 1.5, 0.0, 0.0], make(output=[0, 0], temperature=0.0, frequency_penalty=0.4)) == 1


def test_logit_bias_moves_the_choice() -> None:
    assert sample([2.0, 1.0, 0.0, 0.0], make(temperature=0.0, logit_bias={2: 5.0})) == 2


def test_min_tokens_forbids_every_way_to_stop() -> None:
    logits = [1.0, 5.0, 0.0, 9.0]
    assert sample(logits, make(temperature=0.0, min_tokens=2, stop_token_ids=(1,))) == 0
    assert sample(logits, make(temperature=0.0, min_tokens=2, stop_token_ids=(1,), output=[0, 0])) == EOS
    assert sample(logits, make(temperature=0.0, min_tokens=2, stop_token_ids=(1,), ignore_eos=True)) == EOS


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    expected = torch.log_softmax(logits[0], -1)
    sequence = make(temperature=0.0, logprobs=2, logit_bias={0: 100.0})
    token = Sampler((EOS,)).sample(logits.clone(), [sequence])[0]
    assert token.token_id == 0
    assert token.logprob == pytest.approx(float(expected[0]))
    assert token.top_logprobs is not None
    assert [entry[0] for entry in token.top_logprobs] == [2, 1]
    none_asked = Sampler(()).sample(logits.clone(), [make(temperature=0.0, logprobs=0)])[0]
    assert none_asked.top_logprobs == []
    assert none_asked.logprob == pytest.approx(float(expected[2]))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("max_tokens", 0), ("seed", -1), ("logprobs", 21)],
)
def test_out_of_range_fields_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{"max_tokens": 5, field: value})  # type: ignore[arg-type]
