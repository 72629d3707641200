"""A worker without Ray: load, join an epoch, serve. `worker/actor.py` puts it behind an actor."""

import logging
import os
import threading
import time

import msgspec
import torch

from moeray.comm.errors import StartupError
from moeray.comm.group import CommGroup, host_store, join_store
from moeray.comm.messages import StopEngine, Wake
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import Inbox, KeyPair, PeerLinks, new_key_pair
from moeray.comm.topology import Topology
from moeray.worker.config import WorkerConfig, WorkerReady
from moeray.worker.engine import Engine, EngineParts
from moeray.worker.kv_cache import BlockPool
from moeray.worker.loaded_model import LoadedModel, load_model
from moeray.worker.mailbox import Mailbox
from moeray.worker.messages import ToWorker
from moeray.worker.sampler import Sampler
from moeray.worker.scheduler import Scheduler

logger = logging.getLogger(__name__)

WARM_TIMEOUT_S = 15.0


class Worker:
    """Owns the model, the sockets and the engine's thread of one slot.

    `bind_host` is the address that its inbox and its epoch stores listen on; `client` is the key pair that front ends
    and peers prove to its inbox.
    """

    def __init__(self, *, slot: int, incarnation: int, config: WorkerConfig, client: KeyPair, bind_host: str) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.config = config
        self.bind_host = bind_host
        self.loaded_fraction = 0.0
        self.engine: Engine | None = None
        self.device = torch.device(config.device)
        self._client = client
        self._loaded: LoadedModel | None = None
        self._keys = new_key_pair()
        self._inbox: Inbox | None = None
        self._peers: PeerLinks | None = None
        self._stores: dict[int, object] = {}
        self._topology: Topology | None = None
        self._group: CommGroup | None = None
        self._thread: threading.Thread | None = None

    def load(self, placement: ExpertPlacement) -> WorkerReady:
        """Read the weights that this slot needs, allocate cache and buffers, open the inbox.

        Raises `CheckpointError`, `CapacityError` or `ValueError` with the cause.
        """
        started = time.monotonic()
        torch.set_num_threads(self.config.num_threads)
        loaded = load_model(self.config, placement, self.slot, self._set_progress)
        logger.info("[%d.%d] %s", self.slot, self.incarnation, loaded.buffers.describe())
        self._loaded = loaded
        decoder = msgspec.msgpack.Decoder(ToWorker | Wake)
        self._inbox = Inbox(host=self.bind_host, keys=self._keys, client_keys=(self._client.public,), decoder=decoder)
        config = loaded.model.config
        return WorkerReady(
            slot=self.slot,
            incarnation=self.incarnation,
            pid=os.getpid(),
            node=self.bind_host,
            endpoint=self._inbox.endpoint,
            public_key=self._keys.public,
            dtype=loaded.dtype,
            combine=loaded.combine,
            num_moe_layers=config.num_moe_layers,
            num_experts=config.num_experts,
            max_model_len=loaded.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            num_blocks=loaded.cache.num_blocks - 1,
            weights_bytes=loaded.weights_bytes,
            kv_cache_bytes=loaded.cache.nbytes,
            buffer_bytes=loaded.buffers.nbytes,
            load_s=time.monotonic() - started,
        )

    def _set_progress(self, fraction: float) -> None:
        self.loaded_fraction = fraction

    def host_store(self, epoch: int, timeout_s: float = WARM_TIMEOUT_S) -> tuple[str, int]:
        """Open the rendezvous store of an epoch here; returns its address. It lives until the worker stops."""
        store, port = host_store(self.bind_host, timeout_s)
        self._stores[epoch] = store
        return self.bind_host, port

    def join(self, topology: Topology, store_address: tuple[str, int]) -> str:
        """Build and warm the epoch's group and install its dispatcher; returns the dispatcher's description.

        Raises `GroupTimeout` or `GroupError` naming the slots that did not answer.
        """
        loaded = self._require_loaded()
        rank = topology.rank_of(self.slot)
        store = None
        if topology.size > 1:
            store = join_store(*store_address, timeout_s=WARM_TIMEOUT_S)
        group = CommGroup.build(
            epoch=topology.epoch,
            rank=rank,
            slots=topology.slots,
            store=store,
            device=self.device,
            timeout_s=self.config.group_timeout_s,
            warm_timeout_s=WARM_TIMEOUT_S,
        )
        loaded.exchange.install(topology, group, self.slot)
        self._topology, self._group = topology, group
        return loaded.exchange.describe()

    def serve(self) -> None:
        """Start the engine's thread; the group must be joined."""
        loaded = self._require_loaded()
        if self._topology is None or self._group is None or self._inbox is None:
            raise StartupError(f"slot {self.slot} cannot serve before it has joined a group")
        config, worker = loaded.model.config, self.config
        self._peers = PeerLinks(client_keys=self._client)
        self._peers.update(self._topology.members, self.slot)
        scheduler = Scheduler(
            pool=BlockPool(loaded.cache.num_blocks, prefix_caching=worker.prefix_caching),
            max_num_seqs=worker.max_num_seqs,
            max_num_batched_tokens=worker.max_num_batched_tokens,
            max_model_len=loaded.max_model_len,
            max_queue=worker.max_queue,
            eos_token_ids=config.eos_token_ids,
        )
        parts = EngineParts(
            slot=self.slot,
            incarnation=self.incarnation,
            model=loaded.model,
            cache=loaded.cache,
            scheduler=scheduler,
            sampler=Sampler(config.eos_token_ids),
            exchange=loaded.exchange,
            expert_load=loaded.expert_load,
            mailbox=Mailbox(self._inbox, orphan_timeout_s=worker.orphan_timeout_s, clock=time.monotonic),
            peers=self._peers,
        )
        self.engine = Engine(parts, self._topology, self._group)
        self._thread = threading.Thread(target=self._run_engine, args=(self.engine,), name="engine", daemon=True)
        self._thread.start()

    def _run_engine(self, engine: Engine) -> None:
        torch.set_num_threads(self.config.num_threads)
        engine.run()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the engine's thread to end; False if it still runs."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Ask all ranks to leave the step loop and close the sockets; False if the engine did not end in time."""
        if self._inbox is None:
            return True
        self._inbox.post(StopEngine())
        ended = self.wait(timeout_s)
        if ended:
            self._close()
        return ended

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._peers is not None:
            self._peers.close()
        if self._inbox is not None:
            self._inbox.close()
        self._stores.clear()

    def _require_loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise StartupError(f"slot {self.slot} has not loaded its weights")
        return self._loaded
