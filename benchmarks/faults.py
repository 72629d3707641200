"""What losing a worker costs: pauses of clients, time until it is found, time until another one helps.

    python -m benchmarks.faults kills      kill -9 of each slot of 2, 3 and 4 workers, 20 times, under 16 streams
    python -m benchmarks.faults stops      SIGSTOP of each slot of 3 workers under 16 streams
    python -m benchmarks.faults at-once    kill -9 of all workers but one of 3 and 4, and of both of 2
    python -m benchmarks.faults alarms     5 minutes of load beside 8 busy processes: nobody may be suspected
    python -m benchmarks.faults prefill --model DIR     a prompt of 4,000 tokens on the reference model, the same

All but the last on the demo model, real processes, clients over HTTP. Every stream is compared token by token with a
run without any fault. Prints Markdown and writes it into its section of RESULTS.md.
"""

import argparse
import asyncio
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployment import Deployment
from benchmarks.fault_watch import serving, three, until
from benchmarks.faults_at_once import at_once
from benchmarks.results import Section
from benchmarks.streams import Load, Stream, longest_gap_s, now, reference, requests, stream_one, wrong

STALL_TIMEOUT_S = 1.5
# A pause that begins later than this after a fault is not the fault's.
AFTERMATH_S = 0.1
MODEL_LEN = 512
LONG_PROMPT = 4000


@dataclass(slots=True, kw_only=True)
class Event:
    """A fault that was made, on the streams' clock. `first_token_s` is that of a request sent with the fault."""

    slot: int
    at: float
    num_victims: int
    fenced_s: float = 0.0
    serving_s: float = 0.0
    replaced_at: float = 0.0
    first_token_s: float = 0.0
    moved_bytes: int = 0


async def strike(server: Deployment, slot: int, number: signal.Signals, size: int) -> Event:
    """Send the signal to a member, follow what happens, and return once the lost place is filled."""
    known, victim = len(server.get("/faults")["faults"]), serving(server)[slot]
    body = {"prompt": "He said", "max_tokens": 2, "stream": True, "ignore_eos": True, "temperature": 0.0}
    event = Event(slot=slot, at=now(), num_victims=victim["num_requests"])
    struck = time.time()
    os.kill(victim["pid"], number)
    request = asyncio.create_task(stream_one(server.url, -1, body))
    await until(lambda: len(server.get("/faults")["faults"]) > known, "the fault is noticed")
    await until(lambda: server.get("/faults")["faults"][-1]["recovered_s"] is not None, "the others serve")
    fault = server.get("/faults")["faults"][-1]
    event.fenced_s = fault["at"] - struck
    event.serving_s = fault["at"] + fault["recovered_s"] - struck
    await until(lambda: len(serving(server)) == size, "the worker is replaced")
    event.replaced_at = now()
    answer = await request
    if answer.error or not answer.times:
        raise RuntimeError(f"a request that came with the fault failed: {answer.error}")
    event.first_token_s = answer.times[0] - event.at
    repairs = [o for o in server.get("/operations")["operations"] if o["kind"] == "repair"]
    event.moved_bytes = repairs[-1]["moved_bytes"]
    return event


async def strikes(
    arguments: argparse.Namespace, directory: Path, size: int, count: int, number: signal.Signals
) -> tuple[list[Event], list[Stream], tuple[int, int], float]:
    """So many faults, slot after slot, under streams; and how long a lost worker's share of them takes to prefill."""
    options = ["--workers", str(size), "--max-workers", str(size + 1), "--spares", str(arguments.spares)]
    with Deployment("demo", options, directory / f"server-{size}.log") as server:
        bodies = requests(arguments.streams, arguments.tokens)
        expected = await reference(server.url, bodies)
        load = Load(server.url, bodies)
        load.start()
        await asyncio.sleep(2.0)
        again_s = await prefill_s(server, arguments.streams // size)
        events = []
        for index in range(count):
            slots = sorted(serving(server))
            events.append(await strike(server, slots[index % size], number, size))
            await asyncio.sleep(arguments.pause_s)
        streams = await load.stop()
        return events, streams, wrong(streams, expected), again_s


def gaps_at(streams: Sequence[Stream], event: Event) -> tuple[float, float]:
    """The longest pause of a survivor's stream, and of one that the lost worker had.

    Which streams it had is not told to clients; as many as it had are taken to be those with the longest pauses.
    """
    end = event.at + AFTERMATH_S

    def longest_wait_s(stream: Stream) -> float:
        return max((wait for at, wait in stream.waits() if at < end and at + wait > event.at), default=0.0)

    slowest = sorted(streams, key=longest_wait_s, reverse=True)
    victims, others = slowest[: event.num_victims], slowest[event.num_victims :]
    return longest_gap_s(others, event.at, end), longest_gap_s(victims, event.at, end)


async def prefill_s(server: Deployment, count: int) -> float:
    """Seconds, beside the load, until that many prompts as long as a stream's middle all have their first token."""
    words = "the old whale saw a ship on the sea "
    bodies = [
        {"prompt": f"{number} " + words * 14, "max_tokens": 1, "stream": True, "temperature": 0.0}
        for number in range(count)
    ]
    started = now()
    answers = await asyncio.gather(*(stream_one(server.url, -1, body) for body in bodies))
    return max(answer.times[0] for answer in answers) - started


def rate(streams: Sequence[Stream], start: float, end: float) -> float:
    """Tokens per second between two moments."""
    return sum(start <= at < end for stream in streams for at in stream.times) / (end - start)


def throughput_ratio(streams: Sequence[Stream], event: Event) -> float:
    """A second that begins one second after the replacement was admitted, to the second before the fault."""
    after = event.replaced_at + 1.0
    return rate(streams, after, after + 1.0) / rate(streams, event.at - 1.0, event.at)


async def kills(arguments: argparse.Namespace, directory: Path, section: Section) -> None:
    """Bars: nothing lost or changed; survivors' gap p95 <= max(10 S, 500 ms), that of the lost worker's streams plus
    their prefill, first token of a new request <= 500 ms after the kill, gap when the replacement is admitted
    <= max(3 S, 150 ms), 95 % of the throughput a second later.
    """
    for size in arguments.sizes:
        events, streams, (failed, changed), again_s = await strikes(
            arguments, directory, size, arguments.count, signal.SIGKILL
        )
        step_s = statistics.median(gap for stream in streams for _, gap in stream.gaps())
        survivors, victims = zip(*(gaps_at(streams, event) for event in events), strict=True)
        admissions = [longest_gap_s(streams, e.replaced_at - 0.2, e.replaced_at) for e in events]
        bar_s = max(10 * step_s, 0.5)
        ratio = statistics.median(throughput_ratio(streams, event) for event in events)
        section.add(
            f"{size} workers, {len(events)} kills, {len(streams)} streams: {failed} failed, {changed} with changed "
            f"tokens. S {step_s * 1e3:.0f} ms.",
            "",
            "| ms | median / p95 / max | bar for p95 |",
            "|---|---|---|",
            f"| from the kill until the others serve | {three([event.serving_s for event in events])} | |",
            f"| longest gap, survivors' streams | {three(survivors)} | {bar_s * 1e3:.0f} |",
            f"| longest gap, the lost worker's streams | {three(victims)} | {(bar_s + again_s) * 1e3:.0f} |",
            f"| first token of a request sent with the kill | {three([e.first_token_s for e in events])} | 500 |",
            f"| longest gap when another is admitted | {three(admissions)} | {max(3 * step_s, 0.15) * 1e3:.0f} |",
            "",
            f"Throughput from one second after the admission on, against the second before the kill: {ratio:.2f} "
            f"(median; bar 0.95). Read from the checkpoint, the lost experts: "
            f"{statistics.median(event.moved_bytes for event in events) / 1024:.0f} KiB.",
            "",
        )


async def stops(arguments: argparse.Namespace, directory: Path, section: Section) -> None:
    """Bars: fenced <= the stall time-out + 0.4 s, serving <= + 0.9 s."""
    events, streams, (failed, changed), _ = await strikes(arguments, directory, 3, arguments.count, signal.SIGSTOP)
    section.add(
        f"{len(events)} workers stopped, {len(streams)} streams: {failed} failed, {changed} with changed tokens. After "
        f"the signal (median / p95 / max, ms): found and ended {three([e.fenced_s for e in events])} "
        f"(bar {(STALL_TIMEOUT_S + 0.4) * 1e3:.0f}), the others serve {three([e.serving_s for e in events])} "
        f"(bar {(STALL_TIMEOUT_S + 0.9) * 1e3:.0f})."
    )


def spin() -> None:
    """A process that wants a core for itself."""
    while True:
        pass


async def alarms(arguments: argparse.Namespace, directory: Path, section: Section) -> None:
    """Bar: no fault, with four times as many busy processes as cores, long prompts among the streams."""
    with ExitStack() as stack:
        server = stack.enter_context(Deployment("demo", ["--workers", "3"], directory / "server.log"))
        bodies = requests(arguments.streams, arguments.tokens)
        bodies[0] |= {"prompt": "sea " * (MODEL_LEN // 2), "max_tokens": 8}
        expected = await reference(server.url, bodies)
        spinning = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(8)]
        for process in spinning:
            process.start()
            stack.callback(process.terminate)
        load = Load(server.url, bodies)
        load.start()
        await asyncio.sleep(arguments.seconds)
        streams = await load.stop()
        faults = server.get("/faults")["faults"]
    failed, changed = wrong(streams, expected)
    longest = max(gap for stream in streams for _, gap in stream.gaps())
    section.add(
        f"{arguments.seconds:.0f} s beside {len(spinning)} busy processes on {os.cpu_count()} cores, {len(streams)} "
        f"streams: {failed} failed, {changed} with changed tokens, {len(faults)} faults; longest gap {longest:.2f} s."
    )


async def prefill(arguments: argparse.Namespace, directory: Path, section: Section) -> None:
    """Bar: no fault while one worker computes a long prompt and the other waits for it, layer by layer."""
    if arguments.model is None:
        raise SystemExit("prefill needs --model, a directory that benchmarks/reference_model.py has made")
    options = ["--workers", "2", "--threads", "1", "--kv-cache-gib", "1"]
    with Deployment(str(arguments.model), options, directory / "server.log") as server:
        body = {"input_ids": [7 + k % 1000 for k in range(LONG_PROMPT)], "max_tokens": 2, "ignore_eos": True}
        answer = await stream_one(server.url, 0, {**body, "stream": True, "temperature": 0.0})
        faults = server.get("/faults")["faults"]
    if answer.error:
        raise RuntimeError(f"the long prompt failed: {answer.error}")
    section.add(
        f"A prompt of {LONG_PROMPT} tokens on 2 workers of one thread: first token after "
        f"{answer.times[0] - answer.began:.1f} s, {len(faults)} faults (stall time-out {STALL_TIMEOUT_S:g} s)."
    )


WORK = {"kills": kills, "stops": stops, "at-once": at_once, "alarms": alarms, "prefill": prefill}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WORK)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=2.5)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--dry", action="store_true", help="print only, leave RESULTS.md as it is")
    arguments = parser.parse_args(argv)
    section = Section(f"faults {arguments.what}")
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(WORK[arguments.what](arguments, Path(directory), section))
    if not arguments.dry:
        section.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
