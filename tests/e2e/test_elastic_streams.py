"""The size changes while clients stream: nobody fails, is refused or gets other tokens, and who left leaves nothing."""

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.support.elastic import Elastic, Streams, assert_no_more_than, holdings, listening_ports
from tests.support.serving import Serve, client, poll

MAX_WORKERS = 4
GONE_S = 2.0
STORE_DESCRIPTORS = 16
COMMAND_THREADS = 4
# A request that waits for a wake that was lost waits for the group's own time-out.
PROMPT_S = 5.0


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elastic]:
    options = ("--workers", "4", "--max-workers", str(MAX_WORKERS), "--kv-cache-gib", "0.05")
    with Serve(tmp_path_factory.mktemp("serve"), "demo", *options) as serve, client(serve.url()) as http:
        yield Elastic(serve.url(), http)


@pytest.fixture(scope="module")
def streams(elastic: Elastic) -> Streams:
    return Streams(elastic.url, count=8, max_tokens=160)


def short(number: int) -> dict[str, Any]:
    return {"prompt": "The whale", "max_tokens": 1 + number % 3, "temperature": 0.0, "ignore_eos": True}


def choices(http: httpx.Client, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer to a request for several completions, logarithms of probabilities included."""
    answer = http.post("/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


def several(prompt: str, seed: int) -> dict[str, Any]:
    fields = {"n": 4, "max_tokens": 100, "temperature": 0.9, "seed": seed, "ignore_eos": True, "logprobs": 1}
    return {"prompt": prompt, **fields}


def test_streams_go_on_with_the_same_tokens_through_six_changes_of_size(elastic: Elastic, streams: Streams) -> None:
    sizes = [1, 4, 2, 3, 1, 4]
    with streams.running():
        operations = [elastic.scale(workers=size) for size in sizes]
    assert [len(operation["targets"]) for operation in operations] == sizes
    assert sum(operation["kv_blocks"] for operation in operations) > 0
    epochs = [operation["to_epoch"] for operation in operations]
    assert epochs == sorted(set(epochs))


def test_a_rebalance_moves_experts_and_changes_no_token(elastic: Elastic, streams: Streams) -> None:
    """Who has which expert after a change of size is not decided by load."""
    elastic.at_size(4)
    with streams.running():
        time.sleep(0.5)
        for size in (4, 3):
            elastic.at_size(size)
            _rebalance(elastic)


def _rebalance(elastic: Elastic) -> None:
    """Experts move between the processes that are there, and their numbers stay within one of each other."""
    before, pids = elastic.topology(), elastic.pids()
    operation = elastic.rebalance()
    poll("the view shows it", lambda: elastic.topology()["epoch"] == operation["to_epoch"], 5.0)
    after = elastic.topology()
    assert operation["kind"] == "rebalance"
    assert operation["moved_experts"] == _num_arrived(before["placement"], after["placement"]) > 0
    assert operation["moved_bytes"] > 0
    assert elastic.pids() == pids
    for layer in after["placement"]:
        counts = [sum(expert >= 0 for expert in seats) for seats in layer]
        assert max(counts) - min(counts) <= 1


def _num_arrived(before: list[list[list[int]]], after: list[list[list[int]]]) -> int:
    """Experts that a worker has and had not, in all layers."""
    return sum(
        len(set(new) - {-1} - set(old))
        for layers in zip(before, after, strict=True)
        for old, new in zip(*layers, strict=True)
    )


def test_each_slot_retires_while_it_serves_and_leaves_nothing(elastic: Elastic, streams: Streams) -> None:
    """Slots 0, 1 and 2 one after the other, then 3, after 0 has come back with another incarnation."""
    elastic.at_size(4)
    bodies = [several("It was a dark evening, and", seed=3), several("The old house", seed=4)]
    expected = [choices(elastic.http, body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as others, client(elastic.url) as http, streams.running():
        for slot in (0, 1, 2, 3):
            if slot == 3:
                elastic.scale(workers=2)
            answers = [others.submit(choices, http, body) for body in bodies]
            _retire(elastic, slot, answers)
            assert [answer.result(60.0) for answer in answers] == expected
    assert elastic.slots == [0]


def _retire(elastic: Elastic, slot: int, answers: list[Future[list[dict[str, Any]]]]) -> None:
    """The slot leaves while it has requests; 2 s later its process and its sockets are gone."""
    num_streams = 8

    def is_busy() -> bool:
        members = elastic.members()
        requests = {slot: int(member["num_requests"]) for slot, member in members.items()}
        return sum(requests.values()) >= num_streams + 4 and requests[slot] > 1

    poll(f"slot {slot} serves streams and whole answers", is_busy, 20.0)
    pids = elastic.pids()
    leaver = psutil.Process(pids.pop(slot))
    ports = listening_ports(leaver.pid)
    assert ports
    before = holdings(list(pids.values()))
    assert not any(answer.done() for answer in answers)
    operation = elastic.scale(retire=[slot])
    assert operation["leavers"] == [slot]
    deadline = time.monotonic() + GONE_S
    poll(f"the process of slot {slot} is gone", lambda: not leaver.is_running(), GONE_S)
    assert not any(_listens(port) for port in ports)
    for pid in pids.values():
        found = psutil.Process(pid).net_connections(kind="tcp")
        linked = [c for c in found if c.raddr and c.raddr.port in ports and c.status == psutil.CONN_ESTABLISHED]
        assert not linked
    # The first slot of the next epoch hosts its store; commands are waited for in a few threads that are kept.
    left_s = max(0.1, deadline - time.monotonic())
    assert_no_more_than(before, left_s, more_fds=STORE_DESCRIPTORS, more_threads=COMMAND_THREADS)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_two_changes_at_once_are_one_too_many(elastic: Elastic) -> None:
    elastic.at_size(1)
    with ThreadPoolExecutor(2) as both, client(elastic.url) as http:
        asked = [both.submit(http.post, "/scale", json={"workers": 2}) for _ in range(2)]
        taken, refused = sorted((each.result(30.0) for each in asked), key=lambda answer: answer.status_code)
    assert (taken.status_code, refused.status_code) == (202, 409)
    operation_id = taken.json()["operation_id"]
    assert operation_id in refused.json()["error"]["message"]
    assert refused.headers["location"] == f"/operations/{operation_id}"
    assert elastic.ended(taken.json())["outcome"] == "done"
    assert elastic.start(workers=1, operation_id=operation_id)["targets"] == [0, 1], "a known id starts nothing"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workers": 0}, "from 1 to 4"),
        ({"workers": -1}, "from 1 to 4"),
        ({"workers": 5}, "from 1 to 4"),
        ({"workers": "3"}, "from 1 to 4"),
        ({"workers": True}, "from 1 to 4"),
        ({"workers": 2.5}, "from 1 to 4"),
        ({"retire": [9]}, "{serving}"),
        ({"retire": ["0"]}, "{serving}"),
        ({"retire": [0, 1]}, "from 1 to 4"),
        ({"retire": [0, 0]}, "once"),
        ({}, "workers and retire"),
        ({"workers": 3, "deadline_s": 0}, "deadline_s"),
    ],
)
def test_a_wish_beyond_the_limits_is_refused_with_them(elastic: Elastic, fields: dict[str, Any], words: str) -> None:
    elastic.at_size(2)
    before, history = elastic.topology(), elastic.operations()
    answer = elastic.http.post("/scale", json=fields)
    assert answer.status_code == 400, answer.text
    assert words.format(serving=elastic.slots) in answer.json()["error"]["message"]
    assert (elastic.topology(), elastic.operations()) == (before, history)


def test_a_change_while_all_are_parked_needs_no_request(elastic: Elastic, streams: Streams) -> None:
    elastic.at_size(2)
    poll("nobody has anything to do", elastic.is_idle, 10.0)
    elastic.scale(retire=[elastic.slots[0]])
    elastic.scale(workers=3)
    with streams.running():
        pass


def test_one_busy_worker_among_idle_ones_is_not_disturbed(elastic: Elastic) -> None:
    """An idle one leaves, then the busy one itself."""
    body = {"prompt": "It", "temperature": 0.0, "ignore_eos": True, "max_tokens": 500}
    expected = elastic.http.post("/generate", json=body).json()["token_ids"]
    elastic.at_size(3)
    poll("nobody has anything to do", elastic.is_idle, 10.0)
    with ThreadPoolExecutor(1) as other, client(elastic.url) as http:
        answer = other.submit(http.post, "/generate", json=body)
        poll("it runs", lambda: not elastic.is_idle(), 10.0)
        requests = {slot: member["num_requests"] for slot, member in elastic.members().items()}
        assert sorted(requests.values()) == [0, 0, 1]
        busy = max(requests, key=lambda slot: requests[slot])
        elastic.scale(retire=[next(slot for slot in requests if slot != busy)])
        elastic.scale(retire=[busy])
        assert not answer.done()
        assert answer.result(60.0).json()["token_ids"] == expected


def test_requests_that_race_the_park_are_answered_at_once_whatever_the_size(elastic: Elastic) -> None:
    """Each request ends as soon as it began, so all ranks park and are woken again and again, also by a switch."""
    elastic.at_size(1)
    rng = random.Random(1)
    expected = [elastic.http.post("/generate", json=short(number)).json()["token_ids"] for number in range(3)]
    for size in (2, 1):
        operation = elastic.start(workers=size)
        path = f"/operations/{operation['operation_id']}"
        num_after = 0
        while num_after < 150:
            began = time.monotonic()
            answer = elastic.http.post("/generate", json=short(num_after)).json()
            assert answer["token_ids"] == expected[num_after % 3]
            assert time.monotonic() - began < PROMPT_S
            time.sleep(rng.random() * 0.01)  # the moment at which the next one meets the park
            if num_after or elastic.http.get(path).json()["outcome"] is not None:
                num_after += 1
        assert elastic.ended(operation)["outcome"] == "done"
