"""A worker without Ray: load, join an epoch, serve. `worker/actor.py` puts it behind an actor."""

import logging
import os
import threading
import time
from concurrent.futures import Future

import msgspec
import torch

from moeray.comm import faults
from moeray.comm.errors import GroupError, StartupError
from moeray.comm.group import CommGroup, host_store, join_store
from moeray.comm.messages import KVBlock, MemberStatus, Nudge, StopEngine, TransferReport, Wake
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import Inbox, KeyPair, PeerLinks, new_key_pair
from moeray.comm.topology import Topology
from moeray.worker.beside import Job
from moeray.worker.commands import CommitEpoch, Halt, PreparedEpoch, StartHandOver
from moeray.worker.config import WorkerConfig, WorkerReady
from moeray.worker.engine import Engine
from moeray.worker.engine_parts import assemble
from moeray.worker.expert_transfer import fetch_experts, fill_seats, seat_fills
from moeray.worker.loaded_model import LoadedModel, load_model
from moeray.worker.messages import ToWorker
from moeray.worker.peer_checkpoint import CheckpointSource, LocalSource

logger = logging.getLogger(__name__)

WARM_TIMEOUT_S = 15.0
# How many tensors with NaNs or infinities are told.
MAX_NOT_FINITE = 100


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
        self._prepared: PreparedEpoch | None = None
        self._discarded: set[int] = set()
        self._leaving = False
        self._committed_epoch: int | None = None
        self._thread: threading.Thread | None = None

    def load(self, placement: ExpertPlacement | None, source: CheckpointSource | None = None) -> WorkerReady:
        """Read the weights that this slot needs, allocate cache and buffers, open the inbox.

        Without a placement no expert is read: `transfer` will. `source` is asked if the checkpoint is not on this
        node. Raises `CheckpointError`, `CapacityError` or
        `ValueError` with the cause.
        """
        started = time.monotonic()
        faults.points.here(self.slot, self.incarnation)
        faults.reach("during_load")
        torch.set_num_threads(self.config.num_threads)
        loaded = load_model(self.config, placement, self.slot, self._set_progress, source)
        logger.info("[%d.%d] %s", self.slot, self.incarnation, loaded.buffers.describe())
        self._loaded = loaded
        decoder = msgspec.msgpack.Decoder(ToWorker | Wake | KVBlock)
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
            weights=loaded.weights,
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
            seat_bytes=sum(runner.routed_experts.seat_nbytes for runner in loaded.model.moe_runners()),
            load_s=time.monotonic() - started,
            load_peak_bytes=loaded.report.peak_bytes,
            not_finite=loaded.report.not_finite[:MAX_NOT_FINITE],
        )

    def _set_progress(self, fraction: float) -> None:
        self.loaded_fraction = fraction

    def checkpoint_source(self) -> LocalSource:
        """This worker's checkpoint, for a peer whose node lacks it."""
        return LocalSource(self._require_loaded().checkpoint)

    def host_store(self, epoch: int, timeout_s: float = WARM_TIMEOUT_S) -> tuple[str, int]:
        """Open the rendezvous store of an epoch here; returns its address. It lives until the epoch is over."""
        store, port = host_store(self.bind_host, timeout_s)
        self._stores[epoch] = store
        return self.bind_host, port

    def join(self, topology: Topology, store_address: tuple[str, int]) -> str:
        """Build and warm the first epoch's group; returns the dispatcher's description. See `connect` for errors."""
        self.connect(topology, store_address)
        assert self._prepared is not None
        return self._prepared.exchange.describe(self._require_loaded().combine)

    def connect(self, topology: Topology, store_address: tuple[str, int]) -> str:
        """Build and warm an epoch's group beside the one that serves; returns a digest that all members must share.

        Raises `GroupTimeout` or `GroupError` naming the slots that did not answer.
        """
        loaded = self._require_loaded()
        rank = topology.rank_of(self.slot)
        store = join_store(*store_address, timeout_s=WARM_TIMEOUT_S) if topology.size > 1 else None
        group = CommGroup.build(
            epoch=topology.epoch,
            rank=rank,
            slots=topology.slots,
            store=store,
            device=self.device,
            timeout_s=self.config.group_timeout_s,
            warm_timeout_s=WARM_TIMEOUT_S,
        )
        if topology.epoch in self._discarded:
            group.close()
            raise GroupError(f"epoch {topology.epoch} was discarded while slot {self.slot} built its group")
        exchange = loaded.exchange.prepare(topology, group, self.slot)
        self._prepared = PreparedEpoch(topology, group, exchange)
        agreed = (loaded.dtype, loaded.weights, loaded.combine, exchange.choice.name, loaded.max_model_len)
        return "/".join(map(str, (topology.digest(), *agreed)))

    def transfer(self, topology: Topology) -> TransferReport:
        """Fill the seats that this placement gives to this slot and the serving one does not.

        Reads ahead first, so that the slices between the engine's steps find the pages in memory. Raises `ValueError`
        if a seat in use would be overwritten, `CheckpointError` if the checkpoint cannot be read.
        """
        started = time.monotonic()
        loaded, engine = self._require_loaded(), self.engine
        # A worker whose step loop has ended serves nothing: it may be a joiner again.
        current = engine.topology.placement if engine is not None else None
        fills = seat_fills(current, topology.placement, self.slot)
        faults.reach("during_transfer")
        num_bytes = 0
        for experts in fetch_experts(loaded.model, loaded.checkpoint, fills):
            steps = fill_seats(loaded.model, experts)
            if engine is None:
                for _ in steps:
                    pass
            else:
                done: Future[None] = Future()
                self._post(Job(steps, done))
                done.result()
            num_bytes += sum(expert.nbytes for expert in experts)
        return TransferReport(num_experts=len(fills), num_bytes=num_bytes, seconds=time.monotonic() - started)

    def hand_over(self, targets: tuple[int, ...]) -> "Future[int]":
        """This worker is going to leave: copy its sequences' KV to these slots while they still decode.

        The future gets the number of blocks once all full ones are there; later ones follow until the switch.
        """
        faults.reach("during_hand_over")
        self._leaving = bool(targets)
        done: Future[int] = Future()
        self._post(StartHandOver(targets, done))
        return done

    def commit(self, epoch: int) -> "Future[int]":
        """Say ready for a prepared epoch; the future gets its number once this worker has switched.

        A joiner starts its step loop. Raises `StartupError` if the epoch was never prepared here.
        """
        prepared, done = self._prepared, Future[int]()
        self._require_loaded()
        if self.engine is not None and self._leaving:
            self._post(CommitEpoch(epoch, None, done))
        elif prepared is None or prepared.topology.epoch != epoch:
            raise StartupError(f"slot {self.slot} cannot commit epoch {epoch}, it was not prepared here")
        elif self.engine is None:
            self._start_engine(prepared, done)
            self._prepared = None
        else:
            self._post(CommitEpoch(epoch, prepared, done))
            self._prepared = None
        # Known at once, before the engine's thread has read the command: a restarted controller may ask just now.
        self._committed_epoch = epoch
        done.add_done_callback(lambda _: self._drop_stores_before(epoch))
        return done

    def halt(self, epoch: int) -> "Future[int]":
        """Give the serving group up and wait for this epoch, or a later one; earlier ones that were prepared are void.

        The future gets the epoch that is left, once nothing of it runs any more: a step that hangs in an exchange ends
        when a peer's process does, or leaves the group itself. Raises `StartupError` if there is no step loop.
        """
        if self.engine is None:
            raise StartupError(f"slot {self.slot} does not serve, it has no group to give up")
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.group.close()
        self._leaving = False
        done: Future[int] = Future()
        self._post(Halt(epoch, done))
        return done

    def nudge(self) -> None:
        """Leave the park: others wait in the header exchange."""
        self._post(Nudge())

    def assume(self, topology: Topology) -> None:
        """While halted: count from this epoch's placement, which others serve already, and whose seats are filled."""
        engine = self.engine
        if engine is None:
            raise StartupError(f"slot {self.slot} does not serve, it cannot assume epoch {topology.epoch}")
        if topology.epoch > engine.epoch:
            engine.topology = topology

    def discard(self, epoch: int) -> None:
        """Forget an epoch that was prepared, or is being prepared, and not committed; harmless if there is none."""
        self._discarded.add(epoch)
        prepared = self._prepared
        if prepared is not None and prepared.topology.epoch == epoch:
            self._prepared = None
            prepared.group.close()
        self._stores.pop(epoch, None)
        if self._leaving and self.engine is not None:
            self.hand_over(())

    def status(self) -> MemberStatus:
        """Where this worker stands; answers at any time."""
        engine, prepared = self.engine, self._prepared
        loaded = self._loaded
        return MemberStatus(
            slot=self.slot,
            incarnation=self.incarnation,
            epoch=engine.epoch if engine else -1,
            prepared_epoch=prepared.topology.epoch if prepared else None,
            committed_epoch=self._committed_epoch,
            topology=engine.topology if engine else None,
            dispatcher=loaded.exchange.describe() if loaded and engine else "",
            is_serving=engine is not None and not engine.has_left and not self.wait(0.0),
            is_halted=engine is not None and engine.is_halted,
        )

    def serve(self) -> None:
        """Start the step loop of the first epoch; its group must be joined."""
        if self._prepared is None:
            raise StartupError(f"slot {self.slot} cannot serve before it has joined a group")
        self.commit(self._prepared.topology.epoch)

    def _start_engine(self, prepared: PreparedEpoch, joined: "Future[int]") -> None:
        loaded = self._require_loaded()
        assert self._inbox is not None
        self._peers = PeerLinks(client_keys=self._client)
        parts = assemble(
            loaded,
            self.config,
            slot=self.slot,
            incarnation=self.incarnation,
            inbox=self._inbox,
            peers=self._peers,
            clock=time.monotonic,
        )
        self.engine = Engine(parts, prepared, joined)
        self._thread = threading.Thread(target=self._run_engine, args=(self.engine,), name="engine", daemon=True)
        self._thread.start()

    def _post(self, command: object) -> None:
        assert self._inbox is not None
        self._inbox.post(command)

    def _drop_stores_before(self, epoch: int) -> None:
        for old in [known for known in self._stores if known < epoch]:
            self._stores.pop(old, None)

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
        if self.engine is not None:
            self.engine.close()
        if self._peers is not None:
            self._peers.close()
        if self._inbox is not None:
            self._inbox.close()
        self._stores.clear()

    def _require_loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise StartupError(f"slot {self.slot} has not loaded its weights")
        return self._loaded
