"""The ledger and the router by themselves."""

import random

import pytest

from moeray.api.errors import ApiError
from moeray.api.ledger import Ledger, RequestEntry, SequenceEntry
from moeray.api.router import Router
from moeray.api.stop import StopMatcher
from moeray.worker.messages import SamplingParams, TokenOutput

MEMBER = (0, 0)


class Letters:
    """A detokeniser that writes token n as the n-th letter and holds nothing back."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return ""


def make_request(
    num: int = 1, *, prompt_len: int = 3, max_tokens: int = 5, stops: tuple[str, ...] = ()
) -> RequestEntry:
    request = RequestEntry(request_id="r", arrived_s=0.0)
    for index in range(num):
        request.sequences.append(
            SequenceEntry(
                request=request,
                seq_id=f"{id(request)}-{index}",
                choice=index,
                index=index,
                prompt_ids=list(range(prompt_len)),
                sampling=SamplingParams(max_tokens=max_tokens, seed=1),
                detokenizer=Letters(),
                stop=StopMatcher(stops),
            )
        )
    return request


def place(ledger: Ledger) -> SequenceEntry:
    sequence = ledger.queue.popleft()
    sequence.member = MEMBER
    return sequence


def token(sequence: SequenceEntry, position: int, token_id: int = 0, **fields: object) -> TokenOutput:
    values = {"attempt": 0, **fields}
    return TokenOutput(seq_id=sequence.seq_id, position=position, token_id=token_id, **values)  # type: ignore[arg-type]


def test_only_the_expected_token_is_taken() -> None:
    ledger = Ledger(10)
    request = make_request()
    ledger.open(request, 1)
    sequence = place(ledger)
    assert ledger.accept(token(sequence, 1), MEMBER) is None
    assert ledger.accept(token(sequence, 0, attempt=1), MEMBER) is None
    assert ledger.accept(token(sequence, 0), (0, 1)) is None
    assert ledger.accept(token(sequence, 0), MEMBER) is sequence
    assert ledger.accept(token(sequence, 0), MEMBER) is None
    assert ledger.num_dropped_tokens == 4
    assert sequence.output_ids == [0]


def test_surplus_after_a_stop_string_is_neither_sent_nor_counted() -> None:
    ledger = Ledger(10)
    request = make_request(stops=("bc",), max_tokens=9)
    ledger.open(request, 1)
    sequence = place(ledger)
    texts = []
    for position, token_id in enumerate([0, 1, 2, 3]):
        ledger.accept(token(sequence, position, token_id), MEMBER)
        if (delta := sequence.take_delta()) is not None:
            texts.append(delta.text)
    assert texts == ["a", "", ""]
    assert (sequence.finish_reason, sequence.is_open, request.is_done) == ("stop", False, True)
    assert request.usage().completion_tokens == 3
    assert ledger.num_dropped_tokens == 1


def test_a_stop_string_and_the_workers_end_in_one_token() -> None:
    ledger = Ledger(10)
    request = make_request(stops=("b",), max_tokens=2)
    ledger.open(request, 1)
    sequence = place(ledger)
    ledger.accept(token(sequence, 0, 0), MEMBER)
    ledger.accept(token(sequence, 1, 1, finish_reason="length"), MEMBER)
    delta = sequence.take_delta()
    assert delta is not None
    assert (delta.text, delta.finish_reason) == ("a", "stop")


def test_text_held_for_a_stop_string_comes_at_the_end() -> None:
    ledger = Ledger(10)
    request = make_request(stops=("bcd",), max_tokens=2)
    ledger.open(request, 1)
    sequence = place(ledger)
    ledger.accept(token(sequence, 0, 1), MEMBER)
    ledger.accept(token(sequence, 1, 2, finish_reason="length"), MEMBER)
    delta = sequence.take_delta()
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("bc", [1, 2], "length")


def test_usage_counts_a_prompt_once_for_all_choices() -> None:
    ledger = Ledger(10)
    request = make_request(3)
    ledger.open(request, 3)
    for _ in range(3):
        ledger.accept(token(place_next := place(ledger), 0, num_cached_tokens=2), MEMBER)
        assert place_next.output_ids == [0]
    usage = request.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 3, 2)


def test_the_queue_is_bounded_beyond_what_leaves_at_once() -> None:
    ledger = Ledger(2)
    ledger.open(make_request(3), num_free=1)
    with pytest.raises(ApiError) as caught:
        ledger.open(make_request(1), num_free=0)
    assert caught.value.status == 429
    assert "retry-after" in caught.value.headers
    ledger.close(ledger.queue[0])
    assert len(ledger.queue) == 2


def test_submit_goes_on_after_what_was_sent() -> None:
    ledger = Ledger(2)
    request = make_request()
    ledger.open(request, 1)
    sequence = place(ledger)
    ledger.accept(token(sequence, 0, 4), MEMBER)
    submit = sequence.submit(lease=9)
    assert (submit.lease, submit.prompt_ids, submit.output_ids, submit.sampling.seed) == (
        9,
        [0, 1, 2],
        [4],
        1,
    )


def test_requeued_sequences_wait_in_order_of_arrival_before_newer_ones_whatever_the_bound() -> None:
    ledger = Ledger(1)
    older, newer = make_request(3), make_request(1)
    ledger.open(older, 3)
    placed = [place(ledger) for _ in range(3)]
    ledger.open(newer, 0)
    ledger.requeue([placed[2], placed[0]])
    assert list(ledger.queue) == [placed[0], placed[2], *newer.sequences]
    assert [sequence.attempt for sequence in (*placed, *newer.sequences)] == [1, 0, 1, 0]
    assert placed[0].member is None
    assert ledger.accept(token(placed[0], 0), MEMBER) is None
    ledger.close(placed[2])
    assert list(ledger.queue) == [placed[0], *newer.sequences]


def test_what_was_told_before_stays_after_a_requeue() -> None:
    ledger = Ledger(1)
    request = make_request(stops=("bcd",), max_tokens=5)
    ledger.open(request, 1)
    sequence = place(ledger)
    for position, token_id in enumerate([0, 1, 2]):
        ledger.accept(token(sequence, position, token_id, num_cached_tokens=2, logprob=-0.5), MEMBER)
    ledger.requeue([sequence])
    assert place(ledger).submit(9).output_ids == [0, 1, 2]
    assert ledger.accept(token(sequence, 2, 2), MEMBER) is None
    again = {"attempt": 1, "num_cached_tokens": 5, "logprob": -0.5}
    assert ledger.accept(token(sequence, 3, 3, **again), MEMBER) is sequence
    delta = sequence.take_delta()
    assert delta is not None
    assert (delta.text, delta.finish_reason) == ("a", "stop")
    assert [entry.text_offset for entry in delta.logprobs] == [0, 1, 2, 3]
    usage = request.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 2)


def test_a_leaving_member_gets_nothing_and_keeps_what_it_has() -> None:
    router = Router(2)
    router.add((0, 0))
    router.add((1, 0))
    router.take((0, 0), 1)
    router.set_leaving((0, 0), True)
    router.take((1, 0), 100)
    assert (router.choose(), router.num_free(), router.at_slot(0)) == ((1, 0), 1, None)
    assert router.members == ((0, 0), (1, 0))
    assert router.load((0, 0)).num_sequences == 1
    router.set_leaving((0, 0), False)
    assert (router.choose(), router.num_free(), router.at_slot(0)) == ((0, 0), 2, (0, 0))
    router.take((1, 0), 1)
    assert router.at_slot(1) == (1, 0)
    assert (router.at_slot(7), router.at_slot(None)) == (None, None)
    router.set_leaving((7, 0), True)


def test_64_alike_on_4_idle_workers_land_16_each() -> None:
    router = Router(128)
    for slot in (3, 1, 0, 2):
        router.add((slot, 0))
    chosen = []
    for _ in range(64):
        member = router.choose()
        assert member is not None
        router.take(member, 110)
        chosen.append(member[0])
    assert [chosen.count(slot) for slot in range(4)] == [16] * 4
    assert chosen[:4] == [0, 1, 2, 3]


def test_tokens_and_not_requests_are_balanced() -> None:
    router = Router(128)
    router.add((0, 0))
    router.add((1, 0))
    router.take((0, 0), 1000)
    for _ in range(5):
        assert router.choose() == (1, 0)
        router.take((1, 0), 100)
    router.progress((0, 0), 600)
    assert router.choose() == (0, 0)


def test_full_and_removed_members_get_nothing() -> None:
    router = Router(1)
    assert router.choose() is None
    router.add((0, 0))
    router.add((1, 0))
    router.take((0, 0), 1)
    assert (router.choose(), router.num_free()) == ((1, 0), 1)
    router.remove((1, 0))
    assert router.choose() is None
    router.release((0, 0), 1)
    assert router.choose() == (0, 0)
    router.release((1, 0), 5)
    router.progress((1, 0), 5)


def test_load_returns_to_zero_after_random_lives() -> None:
    rng = random.Random(3)
    router = Router(8)
    for slot in range(3):
        router.add((slot, 0))
    live: list[list[int]] = []
    for _ in range(500):
        member = router.choose()
        if member is not None and rng.random() < 0.5:
            tokens = rng.randrange(1, 50)
            router.take(member, tokens)
            live.append([member[0], tokens])
        elif live:
            entry = live[rng.randrange(len(live))]
            done = rng.randrange(entry[1] + 1)
            router.progress((entry[0], 0), done)
            entry[1] -= done
            if rng.random() < 0.5:
                router.release((entry[0], 0), entry[1])
                live.remove(entry)
    for slot, tokens in live:
        router.release((slot, 0), tokens)
    loads = [router.load((slot, 0)) for slot in range(3)]
    assert [(load.num_sequences, load.outstanding_tokens) for load in loads] == [(0, 0)] * 3
