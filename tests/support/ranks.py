"""Several ranks of the real model in one process, a thread each: real groups and dispatchers, no sockets and no Ray."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from moeray.comm.group import CommGroup, host_store, join_store
from moeray.comm.placement import ExpertPlacement
from moeray.comm.topology import Member, Topology
from moeray.worker.batch import prepare_batch
from moeray.worker.config import WorkerConfig
from moeray.worker.kv_cache import BlockPool
from moeray.worker.loaded_model import LoadedModel, load_model
from moeray.worker.messages import SamplingParams, Submit
from moeray.worker.models.registry import read_model_config
from moeray.worker.request import Sequence as RequestSequence
from moeray.worker.sampler import Sampler
from moeray.worker.scheduler import Scheduler

T = TypeVar("T")
DEADLINE_S = 60.0


def on_every_rank(size: int, work: Callable[[int], T]) -> list[T]:
    """Run `work(rank)` in a thread each and return the results in rank order; the first error is raised."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    assert len(results) == size, f"ranks without an answer: {sorted(set(range(size)) - set(results))}"
    return [results[rank] for rank in range(size)]


@dataclass(frozen=True)
class Generated:
    """What a prompt led to: output tokens and the fp32 logits [N, V] that each was chosen from."""

    tokens: list[int]
    logits: torch.Tensor


@dataclass
class Rank:
    """One rank's model, group and scheduler."""

    loaded: LoadedModel
    group: CommGroup
    scheduler: Scheduler
    logits: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class RankSet:
    """`size` ranks that serve one checkpoint. Use as a context manager."""

    def __init__(self, path: Path, size: int, **overrides: object) -> None:
        config = read_model_config(path, str(overrides.get("model_impl", "auto")))
        num_seats = -(-config.num_experts // size)
        placement = ExpertPlacement.contiguous(
            num_layers=config.num_moe_layers, num_experts=config.num_experts, slots=range(size), num_seats=num_seats
        )
        members = tuple(
            Member(slot=slot, incarnation=0, node="here", endpoint="", public_key="") for slot in range(size)
        )
        self.topology = Topology(epoch=0, members=members, placement=placement)
        settings: dict[str, object] = {
            "model_path": str(path),
            "num_seats": num_seats,
            "max_workers": size,
            "kv_cache_bytes": 32 << 20,
            "max_num_seqs": 32,
            **overrides,
        }
        self.worker = WorkerConfig(**settings)  # type: ignore[arg-type]
        store, port = host_store("127.0.0.1", 10.0) if size > 1 else (None, 0)
        self.ranks = on_every_rank(size, lambda rank: self._make(rank, port))
        del store

    def _make(self, rank: int, port: int) -> Rank:
        loaded = load_model(self.worker, self.topology.placement, rank, lambda _: None)
        group = CommGroup.build(
            epoch=0,
            rank=rank,
            slots=self.topology.slots,
            store=join_store("127.0.0.1", port, timeout_s=10.0) if self.topology.size > 1 else None,
            device=torch.device("cpu"),
            timeout_s=30.0,
            warm_timeout_s=10.0,
        )
        loaded.exchange.install(self.topology, group, rank)
        scheduler = Scheduler(
            pool=BlockPool(loaded.cache.num_blocks, prefix_caching=self.worker.prefix_caching),
            max_num_seqs=self.worker.max_num_seqs,
            max_num_batched_tokens=self.worker.max_num_batched_tokens,
            max_model_len=loaded.max_model_len,
            max_queue=1000,
            eos_token_ids=(),
        )
        return Rank(loaded, group, scheduler)

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[Generated]:
        """Run the prompts to their end, prompt i on rank i modulo the number of ranks, all batched together."""
        size = len(self.ranks)
        sequences = [
            RequestSequence.from_submit(
                Submit(
                    lease=0,
                    seq_id=str(number),
                    attempt=0,
                    index=0,
                    prompt_ids=list(prompt),
                    output_ids=[],
                    sampling=sampling,
                ),
                now=0.0,
            )
            for number, prompt in enumerate(prompts)
        ]
        for number, sequence in enumerate(sequences):
            refusal = self.ranks[number % size].scheduler.refusal(sequence)
            assert refusal is None, refusal
            self.ranks[number % size].scheduler.add(sequence)
            self.ranks[number % size].logits[sequence.seq_id] = []
        on_every_rank(size, self._run)
        return [
            Generated(
                sequence.token_ids[sequence.num_prompt_tokens :],
                torch.stack(self.ranks[number % size].logits.pop(sequence.seq_id)),
            )
            for number, sequence in enumerate(sequences)
        ]

    def _run(self, number: int) -> None:
        rank = self.ranks[number]
        sampler = Sampler(())
        while True:
            batch = rank.scheduler.schedule()
            header = torch.tensor([0, 0, batch.num_tokens, 0])
            counts = [int(row[2]) for row in rank.group.exchange_header(header).tolist()]
            if not any(counts):
                return
            rank.loaded.exchange.begin_step(counts)
            prepared = prepare_batch(batch, rank.loaded.cache)
            logits = rank.loaded.model(prepared.forward, rank.loaded.cache)
            for item, row in zip(prepared.sampled, logits, strict=True):
                rank.logits[item.sequence.seq_id].append(row.clone())
            tokens = sampler.sample(logits, [item.sequence for item in prepared.sampled])
            rank.scheduler.commit(batch, [token.token_id for token in tokens])

    def close(self) -> None:
        for rank in self.ranks:
            rank.group.close()

    def __enter__(self) -> "RankSet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
