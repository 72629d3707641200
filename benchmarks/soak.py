"""Everything at once, for minutes: workers die, hang and pause, the size changes, clients leave, talk nonsense and come
in crowds; and every accepted request ends as it would have without.

    python -m benchmarks.soak --seconds 600

The demo model on three workers, real processes, clients over HTTP. Every stream is compared token by token with a run
before anything happened. Prints Markdown and writes it into its section of RESULTS.md. The exit code is 1 if anything
accepted was lost or changed, or anything is left behind. What is drawn depends on `--seed` only, when it meets what
else goes on does not.
"""

import argparse
import asyncio
import random
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.deployment import Deployment
from benchmarks.elastic import inventory
from benchmarks.results import Section
from benchmarks.soak_clients import SLOW_HEALTH_S, Answer, Clients, Health, http_client
from benchmarks.soak_faults import MAX_WORKERS, Faults, Sizes
from benchmarks.streams import STREAM_S, now, percentile

WORKERS = 3
RECOVERY_TIMEOUT_S = 30.0
# The last seconds are for coming back to the size, under load.
CALM_S = 10.0
SETTLE_S = 30.0
# The last good answer of /health and the next one lie this much around a time without a worker, at most.
SEEN_S = 1.0
# What the end may have more than the start, of all processes together.
MORE_THREADS = 2 * (WORKERS + 3)
MORE_DESCRIPTORS = 4 * (WORKERS + 3)
MORE_MEMORY = 1.10
OPTIONS = (
    *("--workers", str(WORKERS), "--max-workers", str(MAX_WORKERS), "--spares", "0", "--kv-cache-gib", "0.02"),
    *("--max-queue", "32", "--max-num-seqs", "16", "--recovery-timeout-s", str(RECOVERY_TIMEOUT_S)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long, with how many steady streams of how many tokens, and the seed of everything that is drawn."""

    seconds: float
    streams: int = 12
    tokens: int = 120
    seed: int

    def __post_init__(self) -> None:
        for name, number, low in (
            ("seconds", self.seconds, 2 * CALM_S),
            ("streams", self.streams, 1),
            ("tokens", self.tokens, 1),
        ):
            if not number >= low:
                raise ValueError(f"{name} is {number}, must be at least {low:g}")


@dataclass(slots=True)
class Outcome:
    """What happened, and in `troubles` everything that should not have."""

    clients: Clients
    outages: list[tuple[float, float]]
    slowest_health_s: float
    events: Counter[str]
    fenced_s: list[float]
    before: dict[str, float]
    after: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    def answered(self, verdict: str) -> int:
        return sum(answer.verdict == verdict for answer in self.clients.answers)


async def soak(server: Deployment, plan: Plan) -> Outcome:
    """Run it to its end, a minute or two after `plan.seconds` at most."""
    lanes = [random.Random(f"{plan.seed} {lane}") for lane in ("clients", "faults", "sizes")]
    async with http_client(server.url) as http:
        clients = Clients(server.url, http, lanes[0], streams=plan.streams, tokens=plan.tokens)
        faults, sizes, health = Faults(http, lanes[1]), Sizes(http, lanes[2]), Health(server.url)
        await clients.learn()
        before = await asyncio.to_thread(inventory, server)
        watch = asyncio.create_task(health.watch())
        try:
            async with clients.streaming():
                end = now() + plan.seconds
                await asyncio.gather(clients.others(end), disturb(faults, sizes, end - CALM_S))
        finally:
            watch.cancel()
        events = faults.counts + sizes.counts
        outcome = Outcome(clients, health.outages(), health.slowest_s, events, faults.fenced_s, before)
        outcome.troubles += faults.troubles + sizes.troubles
        outcome.troubles += [text for text in (trouble(answer, outcome) for answer in clients.answers) if text]
        if health.slowest_s > SLOW_HEALTH_S:
            outcome.troubles.append(f"/health took {health.slowest_s:.1f} s")
        await settle(server, http, outcome)
        return outcome


async def disturb(faults: Faults, sizes: Sizes, end: float) -> None:
    """Both lanes until `end`, and then the size as it was."""
    await asyncio.gather(faults.run(end), sizes.run(end))
    await sizes.back_to(WORKERS)


def trouble(answer: Answer, outcome: Outcome) -> str | None:
    """What is wrong with an answer, if anything is."""
    began, ended = answer.began - SEEN_S, answer.ended + SEEN_S
    outage_s = max((end - start for start, end in outcome.outages if start <= ended and end >= began), default=0.0)
    is_right = {
        "changed": False,
        "lost": False,
        "busy": any(start <= answer.ended and answer.began <= end for start, end in outcome.clients.crowds),
        "unavailable": outage_s > 0,
        "gave up": outage_s >= RECOVERY_TIMEOUT_S - SEEN_S,
    }.get(answer.verdict, True)
    if is_right:
        return None
    return f"{answer.what} {answer.verdict} after {answer.ended - answer.began:.1f} s: {answer.detail[:500]}"


async def settle(server: Deployment, http: httpx.AsyncClient, outcome: Outcome) -> None:
    """Everything must be as it was at the start, after a while at most, and the next request be answered."""
    deadline = now() + SETTLE_S
    while left := [*await held(http), *await grown(server, outcome)]:
        if now() > deadline:
            outcome.troubles += left
            break
        await asyncio.sleep(0.5)
    answer = await http.get("/health")
    if answer.status_code != 200:
        outcome.troubles.append(f"/health is {answer.status_code}: {answer.text}")
    if not await outcome.clients.ask_once():
        outcome.troubles.append(f"the request after it all: {outcome.clients.answers[-1]}")


async def held(http: httpx.AsyncClient) -> list[str]:
    """Requests and blocks that are not free, from the metrics."""
    text = (await http.get("/metrics")).text
    names = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    found = [f"/metrics has {name} twice" for name, count in Counter(names).items() if count > 1]
    for name in ("moeray_requests_open", "moeray_queue_sequences"):
        if f"\n{name} 0.0\n" not in text:
            found.append(f"{name} is not 0")
    values = {
        name: dict(re.findall(rf'^moeray_worker_{name}{{slot="(\d+)"}} (\S+)$', text, re.MULTILINE))
        for name in ("num_running", "num_waiting", "num_free_blocks", "num_blocks")
    }
    if len(values["num_blocks"]) != WORKERS:
        found.append(f"/metrics has workers {sorted(values['num_blocks'])}, {WORKERS} serve")
    for name in ("num_running", "num_waiting"):
        found += [f"worker {slot}: {name} is {count}" for slot, count in values[name].items() if float(count)]
    for slot, count in values["num_blocks"].items():
        if values["num_free_blocks"][slot] != count:
            found.append(f"worker {slot} has {values['num_free_blocks'][slot]} free blocks of {count}")
    return found


async def grown(server: Deployment, outcome: Outcome) -> list[str]:
    """What moeray's own processes hold beyond the start and its margins."""
    before, after = outcome.before, await asyncio.to_thread(inventory, server)
    outcome.after = after
    limits = {
        "processes": before["processes"],
        "threads": before["threads"] + MORE_THREADS,
        "descriptors": before["descriptors"] + MORE_DESCRIPTORS,
        "MiB": before["MiB"] * MORE_MEMORY,
    }
    found = [f"{name}: {after[name]:.0f}, at most {most:.0f}" for name, most in limits.items() if after[name] > most]
    if after["processes"] < before["processes"]:
        found.append(f"processes: {after['processes']:.0f}, were {before['processes']:.0f}")
    return found


def report(section: Section, plan: Plan, outcome: Outcome) -> None:
    """What was done, how it was answered, what is left."""
    section.add("| event | times |", "|---|---|")
    section.add(*(f"| {name} | {count} |" for name, count in sorted(outcome.events.items())))
    verdicts = ("complete", "changed", "lost", "gave up", "busy", "unavailable", "left", "refused")
    section.add("", "| requests | " + " | ".join(verdicts) + " |", "|---" * (len(verdicts) + 1) + "|")
    counts = Counter((answer.what, answer.verdict) for answer in outcome.clients.answers)
    for what in sorted({what for what, _ in counts}):
        section.add(f"| {what} | " + " | ".join(str(counts[what, verdict]) for verdict in verdicts) + " |")
    section.add("", "| moeray's own | " + " | ".join(outcome.before) + " |", "|---" * (len(outcome.before) + 1) + "|")
    for name, values in (("at the start", outcome.before), ("at the end", outcome.after)):
        section.add(f"| {name} | " + " | ".join(f"{value:.0f}" for value in values.values()) + " |")
    section.add(
        "", f"{plan.seconds:g} s, seed {plan.seed}, {plan.streams} streams of {plan.tokens} tokens.", *times(outcome)
    )
    for text in outcome.troubles:
        section.add(f"- **wrong**: {' '.join(text.split())}")
    section.add(f"{'Nothing' if not outcome.troubles else len(outcome.troubles)} wrong.")


def times(outcome: Outcome) -> list[str]:
    """How long things took, in sentences."""
    gaps = [gap for stream in outcome.clients.streams for _, gap in stream.gaps()]
    outages = [end - start for start, end in outcome.outages]
    answered = [answer.ended - answer.began for answer in outcome.clients.answers if answer.verdict == "complete"]
    median_ms, late_ms = statistics.median(gaps) * 1e3, percentile(gaps, 0.99) * 1e3
    return [
        f"Pauses within a stream: median {median_ms:.0f} ms, p99 {late_ms:.0f} ms, maximum {max(gaps):.1f} s; longest "
        f"answer {max(answered):.1f} s (deadline {STREAM_S:g} s).",
        f"Without any worker {len(outages)} times, {max(outages, default=0.0):.1f} s at most. Stopped workers were "
        f"ended within {max(outcome.fenced_s, default=0.0):.1f} s. Slowest `/health` {outcome.slowest_health_s:.2f} s.",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1000))
    parser.add_argument("--log", type=Path, help="where the server's output stays")
    parser.add_argument("--dry", action="store_true", help="print only, leave RESULTS.md as it is")
    arguments = parser.parse_args(argv)
    plan = Plan(seconds=arguments.seconds, seed=arguments.seed)
    sys.stderr.write(f"seed {plan.seed}\n")
    section = Section("soak")
    with tempfile.TemporaryDirectory() as directory:
        log = arguments.log or Path(directory) / "server.log"
        with Deployment("demo", OPTIONS, log) as server:
            outcome = asyncio.run(soak(server, plan))
    report(section, plan, outcome)
    if not arguments.dry:
        section.write()
    return 1 if outcome.troubles else 0


if __name__ == "__main__":
    raise SystemExit(main())
