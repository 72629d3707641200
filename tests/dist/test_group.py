"""One group per epoch: built side by side, warm under a deadline, errors that name slots, and nothing left behind."""

import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from moeray.comm.errors import GroupError, GroupTimeout
from moeray.comm.group import CommGroup, host_store, join_store
from tests.support.expert_ranks import CPU, HOST, build_groups, run_ranks

SHORT_S = 0.5
PATIENT_S = 20.0


def build(rank: int, slots: tuple[int, ...], port: int, epoch: int = 1, warm_timeout_s: float = PATIENT_S) -> CommGroup:
    return CommGroup.build(
        epoch=epoch,
        rank=rank,
        slots=slots,
        store=join_store(HOST, port, PATIENT_S),
        device=CPU,
        timeout_s=SHORT_S,
        warm_timeout_s=warm_timeout_s,
    )


@pytest.fixture
def pair() -> Iterator[list[CommGroup]]:
    """A group of slots 4 and 7 whose operations may take half a second."""
    groups = build_groups((4, 7), timeout_s=SHORT_S)
    yield groups
    for group in groups:
        group.close()


def test_the_store_listens_on_its_address_only() -> None:
    store, port = host_store(HOST, 5.0)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert listening == [HOST]
    store.set("key", "value")
    assert join_store(HOST, port, 5.0).get("key") == b"value"


def test_an_address_of_another_host_is_refused_by_name() -> None:
    with pytest.raises(GroupError, match=r"192\.0\.2\.1"):
        host_store("192.0.2.1", 1.0)


def test_joining_where_no_store_is_ends_at_the_deadline() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port = listener.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(GroupTimeout, match=str(port)):
        join_store(HOST, port, 0.5)
    assert time.monotonic() - started < 10.0


def test_a_group_of_one_has_no_process_group() -> None:
    group = CommGroup.build(epoch=3, rank=0, slots=[6], store=None, device=CPU, timeout_s=1.0, warm_timeout_s=1.0)
    assert (group.size, group.backend_name, group.slots) == (1, "none", (6,))
    assert group.exchange_header(torch.tensor([3, 1, 4])).tolist() == [[3, 1, 4]]
    with pytest.raises(GroupError, match="one rank"):
        group.all_gather(torch.zeros(1), torch.zeros(1))
    group.close()


def test_headers_of_all_ranks_arrive_in_rank_order(pair: list[CommGroup]) -> None:
    def work(rank: int) -> tuple[list[list[int]], bool]:
        first = pair[rank].exchange_header(torch.tensor([rank, 10 * rank]))
        address, seen = first.data_ptr(), first.tolist()
        again = pair[rank].exchange_header(torch.tensor([rank, 11 * rank]))
        return seen + again.tolist(), again.data_ptr() == address

    assert run_ranks(2, work) == [([[0, 0], [1, 10], [0, 0], [1, 11]], True)] * 2


def test_gloo_accepts_a_message_shorter_than_the_posted_receive() -> None:
    """The fact that in-band counts stand on: what is not sent is left as it was."""
    groups = build_groups((0, 1, 2), epoch=5)

    def work(rank: int) -> None:
        generator = torch.Generator().manual_seed(3)
        for _ in range(100):
            sizes = torch.randint(0, 9, (3, 3), generator=generator).fill_diagonal_(0)
            sent = [int(size) for size in sizes[rank]]
            bounds = [0 if source == rank else 8 for source in range(3)]
            send = torch.full((sum(sent), 5), rank, dtype=torch.uint8)
            received = torch.full((16, 5), 99, dtype=torch.uint8)
            groups[rank].exchange(send, sent, received, bounds)
            start = 0
            for source, bound in enumerate(bounds):
                arrived = int(sizes[source, rank])
                assert bool((received[start : start + arrived] == source).all())
                assert bool((received[start + arrived : start + bound] == 99).all())
                start += bound

    run_ranks(3, work)
    for group in groups:
        group.close()


def test_gather_and_reduce_scatter(pair: list[CommGroup]) -> None:
    def work(rank: int) -> tuple[list[float], list[float]]:
        gathered = torch.zeros(4)
        gathered[2 * rank : 2 * rank + 2] = rank + 1.0
        pair[rank].all_gather(gathered, gathered[2 * rank : 2 * rank + 2])
        summed = torch.zeros(2)
        pair[rank].reduce_scatter(summed, torch.arange(4.0) + rank)
        return gathered.tolist(), summed.tolist()

    assert run_ranks(2, work) == [([1.0, 1.0, 2.0, 2.0], [1.0, 3.0]), ([1.0, 1.0, 2.0, 2.0], [5.0, 7.0])]


@pytest.mark.parametrize("absent", [(8,), (5, 8)])
def test_slots_that_do_not_arrive_are_named(absent: tuple[int, ...]) -> None:
    slots = (2, 5, 8)
    store, port = host_store(HOST, PATIENT_S)
    present = [rank for rank, slot in enumerate(slots) if slot not in absent]

    def work(index: int) -> tuple[int, ...]:
        with pytest.raises(GroupTimeout, match="not arrived") as caught:
            build(present[index], slots, port, warm_timeout_s=SHORT_S)
        return caught.value.slots

    started = time.monotonic()
    assert run_ranks(len(present), work) == [absent] * len(present)
    assert time.monotonic() - started < 10.0
    del store


def test_a_peer_that_hangs_is_a_timeout_within_the_deadline(pair: list[CommGroup]) -> None:
    started = time.monotonic()
    with pytest.raises(GroupTimeout, match=r"rank 0 \(slot 4\).*header exchange") as caught:
        pair[0].exchange_header(torch.tensor([1]))
    assert caught.value.slots == (7,)
    assert SHORT_S <= time.monotonic() - started < 5.0


def test_a_peer_that_is_gone_is_an_error_that_names_it(pair: list[CommGroup]) -> None:
    pair[1].close()
    with pytest.raises(GroupError) as caught:
        pair[0].exchange_header(torch.tensor([1]))
    assert caught.value.slots == (7,)
    with pytest.raises(GroupError, match="closed"):
        pair[1].exchange_header(torch.tensor([1]))


@pytest.mark.parametrize("gloo_notices", [True, False])
def test_an_exchange_that_hangs_can_be_broken_from_another_thread(
    monkeypatch: pytest.MonkeyPatch, gloo_notices: bool
) -> None:
    if not gloo_notices:
        monkeypatch.setattr("moeray.comm.group.shut_down", lambda *_: True)
    groups = build_groups((4, 7), timeout_s=PATIENT_S)
    errors: list[GroupError] = []

    def exchange() -> None:
        try:
            groups[0].exchange_header(torch.zeros(3, dtype=torch.int64))
        except GroupError as error:
            errors.append(error)

    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert groups[0].abort() > 0
    thread.join(2.0)
    assert not thread.is_alive()
    assert f"header exchange {'failed' if gloo_notices else 'was broken off'}" in str(errors[0])
    monkeypatch.undo()
    assert (groups[0].abort() > 0) != gloo_notices
    for group in groups:
        group.close()


def test_the_next_group_is_built_while_the_old_one_serves() -> None:
    old = build_groups((0, 1), epoch=1)
    store, port = host_store(HOST, PATIENT_S)
    stop = threading.Event()

    def work(index: int) -> int:
        """Ranks 0 and 1 serve, threads 2 to 4 build the next group: two for the old members and a joiner."""
        if index >= 2:
            group = build(index - 2, (0, 1, 2), port, epoch=2)
            total = int(group.exchange_header(torch.tensor([group.rank])).sum())
            group.close()
            if index == 2:
                stop.set()
            return total
        served = 0
        while True:
            served += 1
            header = torch.tensor([served, int(stop.is_set() or served > 100_000)])
            if int(old[index].exchange_header(header)[:, 1].max()):
                return served

    served, also_served, *totals = run_ranks(5, work)
    assert totals == [3, 3, 3]
    assert served == also_served > 1
    for group in old:
        group.close()
    del store


def test_groups_leave_nothing_behind() -> None:
    def build_and_close(epoch: int) -> None:
        groups = build_groups((0, 1, 2), epoch=epoch)
        run_ranks(3, lambda rank: groups[rank].exchange_header(torch.tensor([rank])).tolist())
        for group in groups:
            group.close()

    build_and_close(1)  # what stays open for good after a first use is not a leak
    process = psutil.Process()
    before = process.num_fds(), process.num_threads()
    for epoch in range(2, 6):
        build_and_close(epoch)
    deadline = time.monotonic() + 10.0
    while (process.num_fds(), process.num_threads()) > before and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    assert process.num_fds() <= before[0]
    assert process.num_threads() <= before[1]


def test_ranks_outside_the_group_and_missing_stores_are_refused() -> None:
    for rank, store_given, text in ((2, True, "rank is 2, must be from 0 to 1"), (0, False, "store is None")):
        store = host_store(HOST, 1.0)[0] if store_given else None
        with pytest.raises(ValueError, match=text):
            CommGroup.build(
                epoch=1, rank=rank, slots=(0, 1), store=store, device=CPU, timeout_s=1.0, warm_timeout_s=1.0
            )
