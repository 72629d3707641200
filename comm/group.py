"""One process group per epoch, built beside the one that serves, without any process-global state.

Headers and, on CPU, rows go through gloo; on CUDA rows go through NCCL. Both are driven through their backend objects
directly, so several groups, also of one process, live side by side. Everything that torch raises is translated here.

Legend: W workers, H header fields, N records, B bytes of a record.
"""

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from moeray.comm import faults
from moeray.comm.descriptors import shut_down, sockets
from moeray.comm.errors import BackendUnavailable, GroupError, GroupTimeout
from moeray.comm.meeting import Meeting, translate
from moeray.comm.timers import timer_slack

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 1024
LOOP_SLACK_S = 0.04
# How soon a wait notices that its group was aborted.
WAIT_SLICE = timedelta(seconds=0.5)


def host_store(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A store that listens on `host` only, on a free port, which is returned with it.

    Raises `GroupError` if the address cannot be bound. `timeout_s` bounds each later wait for a key.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.bind((host, 0))
            listener.listen(LISTEN_BACKLOG)
            port: int = listener.getsockname()[1]
            store = TCPStore(
                host,
                port,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
            )
            # The store closes the descriptor when it goes.
            listener.detach()
    except (OSError, RuntimeError) as error:
        raise GroupError(f"cannot host a store on {host}: {error}") from error
    return store, port


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of the store at `host:port`. Raises `GroupTimeout` if it does not answer within `timeout_s`."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        raise GroupTimeout(f"no store at {host}:{port} within {timeout_s} s: {error}") from error


class CommGroup:
    """The ranks of one epoch. A group of one has no process group at all.

    Not thread-safe: one thread uses a group. After an error the group is lost; only `close` may follow. `num_begun`
    counts collectives, the one that runs included; any thread may read it.
    """

    def __init__(
        self,
        *,
        epoch: int,
        rank: int,
        slots: Sequence[int],
        device: torch.device,
        store: Store | None = None,
        gloo: Any = None,
        nccl: Any = None,
        connections: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Use `build`. The backends are torch's process group objects, None in a group of one.

        `connections` are descriptors of gloo's sockets with their inodes.
        """
        self.epoch = epoch
        self.rank = rank
        self.slots = tuple(slots)
        self.size = len(self.slots)
        self.device = device
        # The rank that hosts the store must not drop it while others are still on their way.
        self._store = store
        self._gloo = gloo
        self._nccl = nccl
        self._connections = connections
        self._is_aborted = False
        self.num_begun = 0
        self._headers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def build(
        cls,
        *,
        epoch: int,
        rank: int,
        slots: Sequence[int],
        store: Store | None,
        device: torch.device,
        timeout_s: float,
        warm_timeout_s: float,
    ) -> Self:
        """Meet all ranks and pass one real collective within `warm_timeout_s`; later ones may take `timeout_s`.

        An epoch's number must not be built twice on one store. Raises `GroupTimeout` that names the slots which did
        not arrive, `GroupError` for any other failure, `ValueError` for a rank outside the group.
        """
        if not 0 <= rank < len(slots):
            raise ValueError(f"rank is {rank}, must be from 0 to {len(slots) - 1}")
        if len(slots) == 1:
            return cls(epoch=epoch, rank=rank, slots=slots, device=device)
        if store is None:
            raise ValueError(f"store is None, a group of {len(slots)} needs one")
        meeting = Meeting(epoch, rank, slots, store, time.monotonic() + warm_timeout_s)
        started = time.monotonic()
        meeting.wait_for_all("arrived")
        faults.reach("during_group_build")
        with meeting.translated():
            others = set(sockets().items())
            gloo = _make_gloo(meeting.store, rank, len(slots), meeting.remaining())
            connections = dict(set(sockets().items()) - others)
            nccl = None
            if device.type == "cuda":
                nccl = _make_nccl(meeting.store, rank, len(slots), meeting.remaining(), device)
        group = cls(
            epoch=epoch,
            rank=rank,
            slots=slots,
            device=device,
            store=store,
            gloo=gloo,
            nccl=nccl,
            connections=connections,
        )
        with meeting.translated():
            group._warm()
            # The first collective may end here before a peer's has: nobody serves until all are through.
        meeting.wait_for_all("warm")
        for backend in (gloo, nccl):
            if backend is not None:
                backend._set_default_timeout(timedelta(seconds=timeout_s))
        logger.info("epoch %d: group of slots %s ready in %.3f s", epoch, slots, time.monotonic() - started)
        return group

    @property
    def accepts_short_messages(self) -> bool:
        """Whether a message may be shorter than the posted receive, so that counts can travel in-band."""
        return self._nccl is None

    @property
    def backend_name(self) -> str:
        if self.size == 1:
            return "none"
        return "gloo" if self._nccl is None else "nccl"

    def exchange_header(self, header_H: torch.Tensor) -> torch.Tensor:
        """All ranks' headers (int64, on the CPU), [W, H]: valid until the next call with as many fields."""
        num_fields = header_H.shape[0]
        if num_fields not in self._headers:
            # Made outside of inference mode, the buffers can be written in it and out of it.
            with torch.inference_mode(False):
                both = torch.empty(2, self.size, num_fields, dtype=torch.int64)
            self._headers[num_fields] = (both[0], both[1])
        headers_WH, copies_WH = self._headers[num_fields]
        if self.size == 1:
            headers_WH[0].copy_(header_H)
            return headers_WH
        # gloo's all-to-all of copies takes half the time of its all-gather.
        copies_WH.copy_(header_H)
        self._run("header exchange", lambda: self._gloo.alltoall_base(headers_WH, copies_WH, [], []))
        return headers_WH

    def exchange_counts(self, counts_in_WC: torch.Tensor, counts_out_WC: torch.Tensor) -> None:
        """Row r of `counts_out_WC` (int64, on the CPU) goes to rank r; row r of `counts_in_WC` comes from it."""
        self._run("count exchange", lambda: self._gloo.alltoall_base(counts_in_WC, counts_out_WC, [], []))

    def exchange(
        self,
        send_NB: torch.Tensor,
        send_splits: Sequence[int],
        recv_NB: torch.Tensor,
        recv_splits: Sequence[int],
    ) -> None:
        """Each rank's split of `send_NB` goes to it; what comes from rank r starts at the sum of the splits before r.

        Splits count rows in rank order and cover their tensor. With `accepts_short_messages` a receive split may be
        larger than what arrives, and the rest of it is left untouched; a rank's own two splits must be equal.
        """
        backend = self._rows
        self._run("all-to-all", lambda: backend.alltoall_base(recv_NB, send_NB, recv_splits, send_splits))

    def all_gather(self, out_N: torch.Tensor, own_N: torch.Tensor) -> None:
        """Every rank's `own_N`, one after the other in rank order. Both flat; `own_N` may lie inside `out_N`."""
        backend = self._rows
        self._run("all-gather", lambda: backend._allgather_base(out_N, own_N))

    def reduce_scatter(self, out_N: torch.Tensor, parts_N: torch.Tensor) -> None:
        """The sum over ranks of part `rank` of `parts_N`. The order of the additions is the backend's."""
        backend = self._rows
        self._run("reduce-scatter", lambda: backend._reduce_scatter_base(out_N, parts_N))

    def close(self) -> None:
        """Give the connections back. Takes some 100 ms: not between two steps. Harmless when repeated."""
        self._gloo = None
        self._nccl = None
        self._store = None

    def abort(self) -> int:
        """Break gloo's connections, so that an exchange that hangs in another thread fails; how many there were.

        It is the only call that may come from another thread. A peer that is merely silent, as behind a cut link, never
        makes an exchange fail by itself.
        """
        self._is_aborted = True
        return sum(shut_down(descriptor, inode) for descriptor, inode in self._connections.items())

    @property
    def _rows(self) -> Any:
        return self._gloo if self._nccl is None else self._nccl

    def _warm(self) -> None:
        """A collective of every kind of connection that serving uses: all pairs connect, headers go round."""
        seen = self.exchange_header(torch.tensor([self.epoch, self.rank], dtype=torch.int64))
        epochs, ranks = seen.unbind(1)
        if not bool((epochs == self.epoch).all()) or ranks.tolist() != list(range(self.size)):
            raise GroupError(f"{self._who()}: ranks met with other epochs or ranks: {seen.tolist()}")
        ones = torch.ones(self.size, 1, dtype=torch.uint8, device=self.device)
        splits = [1] * self.size
        self.exchange(ones, splits, torch.empty_like(ones), splits)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        if self._gloo is None:
            raise GroupError(f"{self._who()}: {what} on a group that is closed or has one rank")
        self.num_begun += 1
        try:
            self._wait(start(), what)
        except RuntimeError as error:
            raise translate(error, f"{self._who()}: {what} failed", self._peers_to_blame()) from error

    def _wait(self, work: Any, what: str) -> None:
        """Until it has ended, or the group was aborted: now and then gloo waits on for sockets that are dead."""
        if self._nccl is not None:
            work.wait()
            return
        while True:
            try:
                work.wait(WAIT_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it ended meanwhile: what came of it
                    return
                if self._is_aborted:
                    raise GroupError(f"{self._who()}: {what} was broken off") from None

    def _who(self) -> str:
        return f"epoch {self.epoch}, rank {self.rank} (slot {self.slots[self.rank]}) of slots {list(self.slots)}"

    def _peers_to_blame(self) -> tuple[int, ...]:
        """torch names a socket and not a rank, so only a group of two knows who it was."""
        return (self.slots[1 - self.rank],) if self.size == 2 else ()


def _make_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    if not dist.is_gloo_available():
        raise BackendUnavailable("this build of torch has no gloo")
    # Its loop looks around every 10 ms whether it should end, which would be most of what an idle worker does.
    with timer_slack(LOOP_SLACK_S):
        backend = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
    backend._set_sequence_number_for_group()
    return backend


def _make_nccl(store: Store, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    if not dist.is_nccl_available():
        raise BackendUnavailable("rows on CUDA need NCCL, this build of torch has none")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(device)
    return backend
