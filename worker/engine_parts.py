"""What an engine is made of, and how it is put together from a loaded model."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from moeray.comm.exchange import ExpertExchange
from moeray.comm.sockets import Inbox, PeerLinks
from moeray.worker.config import WorkerConfig
from moeray.worker.kv_cache import BlockPool
from moeray.worker.loaded_model import LoadedModel
from moeray.worker.mailbox import Mailbox
from moeray.worker.models.model import ServedModel
from moeray.worker.models.paged_cache import PagedKVCache
from moeray.worker.moe.expert_load import ExpertLoad
from moeray.worker.reporter import Reporter
from moeray.worker.sampler import Sampler
from moeray.worker.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of; all of it lives as long as the worker."""

    slot: int
    incarnation: int
    model: ServedModel
    cache: PagedKVCache
    scheduler: Scheduler
    sampler: Sampler
    exchange: ExpertExchange
    expert_load: ExpertLoad
    mailbox: Mailbox
    peers: PeerLinks
    reporter: Reporter
    clock: Callable[[], float] = time.monotonic


def assemble(
    loaded: LoadedModel,
    worker: WorkerConfig,
    *,
    slot: int,
    incarnation: int,
    inbox: Inbox,
    peers: PeerLinks,
    clock: Callable[[], float],
) -> EngineParts:
    """The parts of a worker's one engine; scheduler, mailbox and reporter are made here."""
    eos_token_ids = loaded.model.config.eos_token_ids
    scheduler = Scheduler(
        pool=BlockPool(loaded.cache.num_blocks, prefix_caching=worker.prefix_caching),
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        max_queue=worker.max_queue,
        eos_token_ids=eos_token_ids,
    )
    mailbox = Mailbox(inbox, orphan_timeout_s=worker.orphan_timeout_s, clock=clock)
    reporter = Reporter(
        slot=slot,
        incarnation=incarnation,
        mailbox=mailbox,
        scheduler=scheduler,
        exchange=loaded.exchange,
        clock=clock,
    )
    return EngineParts(
        slot=slot,
        incarnation=incarnation,
        model=loaded.model,
        cache=loaded.cache,
        scheduler=scheduler,
        sampler=Sampler(eos_token_ids),
        exchange=loaded.exchange,
        expert_load=loaded.expert_load,
        mailbox=mailbox,
        peers=peers,
        reporter=reporter,
        clock=clock,
    )
