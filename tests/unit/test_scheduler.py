"""Continuous batching, chunked prefill, prefix reuse and preemption, without a model: tokens are made up."""

import random

import pytest

from moeray.worker.config import BLOCK_SIZE
from moeray.worker.kv_cache import NULL_BLOCK, BlockPool, blocks_for
from moeray.worker.messages import SamplingParams, Submit
from moeray.worker.request import Sequence
from moeray.worker.scheduler import Finished, ScheduledBatch, Scheduler


def make_scheduler(
    *, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 64, max_queue: int = 100, prefix_caching: bool = True
) -> Scheduler:
    return Scheduler(
        pool=BlockPool(num_blocks, prefix_caching=prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=512,
        max_queue=max_queue,
        eos_token_ids=(0,),
    )


def make_sequence(seq_id: str, prompt: list[int], *, max_tokens: int = 4, **sampling: object) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    submit = Submit(lease=0, seq_id=seq_id, attempt=0, index=0, prompt_ids=prompt, output_ids=[], sampling=params)
    return Sequence.from_submit(submit, now=0.0)


def run_step(scheduler: Scheduler, token: int = 5) -> tuple[ScheduledBatch, list[Finished | None]]:
    batch = scheduler.schedule()
    return batch, scheduler.commit(batch, [token] * sum(item.wants_token for item in batch.items))


def counts(batch: ScheduledBatch) -> dict[str, int]:
    return {item.sequence.seq_id: item.num_tokens for item in batch.items}


def test_long_prompts_are_computed_in_chunks_and_decodes_never_wait() -> None:
    scheduler = make_scheduler(budget=32)
    scheduler.add(make_sequence("short", [1] * 5, max_tokens=10))
    assert counts(run_step(scheduler)[0]) == {"short": 5}
    scheduler.add(make_sequence("long", list(range(1, 101)), max_tokens=2))
    steps = [counts(run_step(scheduler)[0]) for _ in range(5)]
    assert [step["short"] for step in steps] == [1] * 5
    assert [step["long"] for step in steps] == [31, 31, 31, 7, 1]


def test_an_empty_scheduler_gives_an_empty_batch() -> None:
    batch = make_scheduler().schedule()
    assert batch.items == ()
    assert batch.num_tokens == 0


def test_full_prefix_blocks_are_reused_but_the_last_token_is_always_computed() -> None:
    scheduler = make_scheduler()
    prompt = list(range(1, 2 * BLOCK_SIZE + 1))
    scheduler.add(make_sequence("first", prompt, max_tokens=1))
    run_step(scheduler)
    scheduler.add(make_sequence("same", prompt, max_tokens=1))
    scheduler.add(make_sequence("longer", [*prompt, 7, 8], max_tokens=1))
    scheduler.add(make_sequence("other", [99, *prompt[1:]], max_tokens=1))
    batch = scheduler.schedule()
    assert counts(batch) == {"same": BLOCK_SIZE, "longer": 2, "other": 2 * BLOCK_SIZE}
    assert [item.sequence.num_cached_tokens for item in batch.items] == [BLOCK_SIZE, 2 * BLOCK_SIZE, 0]


def test_a_block_is_published_only_when_its_step_is_committed() -> None:
    scheduler = make_scheduler(budget=64)
    prompt = list(range(1, BLOCK_SIZE + 2))
    scheduler.add(make_sequence("first", prompt))
    batch = scheduler.schedule()
    scheduler.add(make_sequence("second", prompt))
    assert counts(scheduler.schedule())["second"] == len(prompt), "nothing is committed yet"
    scheduler.commit(batch, [5])
    scheduler.abort({"second"})
    scheduler.add(make_sequence("third", prompt))
    assert counts(scheduler.schedule())["third"] == 1


def test_the_youngest_is_preempted_and_goes_on_with_the_tokens_it_had() -> None:
    scheduler = make_scheduler(num_blocks=1 + 4, prefix_caching=False)
    scheduler.add(make_sequence("old", [1] * 30, max_tokens=30))
    scheduler.add(make_sequence("young", [2] * 30, max_tokens=30))
    for _ in range(4):
        run_step(scheduler)
    assert scheduler.num_preemptions == 1
    assert [seq.seq_id for seq in scheduler.running] == ["old"]
    young = scheduler.waiting[0]
    assert young.token_ids[:30] == [2] * 30
    assert young.num_computed_tokens == 0
    finished = {}
    for _ in range(200):
        batch, verdicts = run_step(scheduler)
        wanting = [item.sequence for item in batch.items]
        for sequence, verdict in zip(wanting, verdicts, strict=False):
            if verdict:
                finished[sequence.seq_id] = sequence.num_output_tokens
        if not scheduler.has_work:
            break
    assert finished == {"old": 30, "young": 30}
    assert scheduler.pool.num_free == 4


def test_abort_frees_blocks_of_running_and_waiting() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence("running", [1] * 40))
    scheduler.add(make_sequence("waiting", [2] * 40))
    run_step(scheduler)
    assert scheduler.abort({"running", "waiting", "unknown"}) == 2
    assert not scheduler.has_work
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


@pytest.mark.parametrize(
    ("sampling", "tokens", "expected"),
    [
        ({"max_tokens": 2}, [5, 5], Finished("length")),
        ({"max_tokens": 9}, [0], Finished("stop", 0)),
        ({"max_tokens": 2, "ignore_eos": True}, [0, 0], Finished("length")),
        ({"max_tokens": 9, "stop_token_ids": (7,)}, [5, 7], Finished("stop", 7)),
        ({"max_tokens": 9, "stop_token_ids": (7,), "min_tokens": 3}, [7, 7, 7], Finished("stop", 7)),
    ],
)
def test_why_a_sequence_ends(sampling: dict[str, object], tokens: list[int], expected: Finished) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("one", [1, 2], **sampling))  # type: ignore[arg-type]
    verdicts = [run_step(scheduler, token)[1][0] for token in tokens]
    assert verdicts == [None] * (len(tokens) - 1) + [expected]
    assert not scheduler.has_work


def test_refusals_name_the_limit() -> None:
    scheduler = make_scheduler(num_blocks=9, max_queue=1)
    exactly = make_sequence("exact", [1] * 100, max_tokens=28)
    assert scheduler.refusal(exactly) is None
    code, message = scheduler.refusal(make_sequence("blocks", [1] * 101, max_tokens=28)) or ("", "")
    assert code == "invalid"
    assert "9 blocks, there are 8" in message
    code, message = scheduler.refusal(make_sequence("length", [1] * 500, max_tokens=13)) or ("", "")
    assert code == "invalid"
    assert "513" in message
    assert "512" in message
    assert scheduler.refusal(make_sequence("empty", [])) is not None
    scheduler.add(exactly)
    assert (scheduler.refusal(make_sequence("more", [1])) or ("", ""))[0] == "queue_full"


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_keeps_every_invariant_and_leaks_no_block(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=1 + rng.randrange(8, 40), max_num_seqs=rng.randrange(1, 6), budget=24)
    done: dict[str, int] = {}
    wanted: dict[str, int] = {}
    aborted: set[str] = set()
    for number in range(300):
        if number < 150 and rng.random() < 0.4:
            prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 60))]
            sequence = make_sequence(str(number), prompt, max_tokens=rng.randrange(1, 30), ignore_eos=True)
            if scheduler.refusal(sequence) is None:
                scheduler.add(sequence)
                wanted[sequence.seq_id] = sequence.sampling.max_tokens
        if rng.random() < 0.05 and scheduler.running:
            victim = rng.choice(scheduler.running).seq_id
            aborted.add(victim)
            scheduler.abort({victim})
        batch = scheduler.schedule()
        assert batch.num_tokens <= 24
        assert len(scheduler.running) <= scheduler.max_num_seqs
        owned = [block for seq in scheduler.running for block in seq.block_table]
        assert NULL_BLOCK not in owned
        for item in batch.items:
            needed = blocks_for(item.sequence.num_computed_tokens + item.num_tokens)
            assert len(item.sequence.block_table) == needed
            assert len(set(item.sequence.block_table)) == needed
        assert len(set(owned)) + scheduler.pool.num_free == scheduler.pool.num_blocks
        wanting = [item.sequence for item in batch.items if item.wants_token]
        verdicts = scheduler.commit(batch, [rng.randrange(1, 3) for _ in wanting])
        for sequence, verdict in zip(wanting, verdicts, strict=True):
            if verdict is not None:
                done[sequence.seq_id] = sequence.num_output_tokens
    while scheduler.has_work:
        batch, verdicts = run_step(scheduler)
        assert batch.items, "work is waiting but nothing runs"
        wanting = [item.sequence for item in batch.items if item.num_tokens]
        for sequence in wanting:
            done[sequence.seq_id] = sequence.num_output_tokens
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert {key: done[key] for key in wanted if key not in aborted} == {
        key: count for key, count in wanted.items() if key not in aborted
    }
