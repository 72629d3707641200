"""What the soak does to the workers, and to their number: two lanes that know nothing of each other."""

import asyncio
import os
import random
import signal
from collections import Counter
from typing import Any

import httpx
import psutil

from benchmarks.streams import now

MAX_WORKERS = 4
PAUSED_S = 0.5
WATCHED_S = 2.5
FENCED_S = 15.0
OPERATION_S = 90.0
BACK_S = 90.0


class Faults:
    """Kills, stops and pauses workers that are members."""

    def __init__(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.troubles: list[str] = []
        self.fenced_s: list[float] = []
        self._http = http
        self._rng = rng

    async def run(self, end: float) -> None:
        """One after the other, drawn by lot, until `end`."""
        kinds = (self._kill, self._kill_two, self._stop, self._pause)
        while now() < end:
            await asyncio.sleep(self._rng.uniform(2.0, 7.0))
            try:
                await self._rng.choices(kinds, weights=(4, 1, 2, 3))[0]()
            except httpx.HTTPError as error:
                self.troubles.append(f"the server did not answer: {error!r}")

    async def _members(self) -> list[tuple[int, int]]:
        """(slot, pid) of the group, in random order."""
        members = (await self._http.get("/topology")).json()["members"]
        group = [(m["slot"], m["pid"]) for m in members if m["rank"] is not None and m["state"] != "dead"]
        return self._rng.sample(group, len(group))

    def _signal(self, pid: int, number: signal.Signals) -> bool:
        """Whether it was still there to get the signal."""
        try:
            if not any("WorkerActor" in word for word in psutil.Process(pid).cmdline()):
                return False
            os.kill(pid, number)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        return True

    async def _kill(self) -> None:
        for _, pid in (await self._members())[:1]:
            self.counts["kill -9"] += self._signal(pid, signal.SIGKILL)

    async def _kill_two(self) -> None:
        killed = [self._signal(pid, signal.SIGKILL) for _, pid in (await self._members())[:2]]
        self.counts["kill -9 of two at once" if sum(killed) > 1 else "kill -9"] += any(killed)

    async def _stop(self) -> None:
        """It hangs, and has to be ended by others."""
        for slot, pid in (await self._members())[:1]:
            if not self._signal(pid, signal.SIGSTOP):
                continue
            self.counts["SIGSTOP"] += 1
            began = now()
            while is_there(pid) and now() - began < FENCED_S:
                await asyncio.sleep(0.02)
            self.fenced_s.append(now() - began)
            if is_there(pid):
                self.troubles.append(f"worker {slot} was stopped and not ended within {FENCED_S:g} s")
                self._signal(pid, signal.SIGKILL)

    async def _pause(self) -> None:
        """It stands still for less than the time-out, and must not be taken for dead."""
        for slot, pid in (await self._members())[:1]:
            known = len(await self._faults_of(slot))
            if not self._signal(pid, signal.SIGSTOP):
                continue
            self.counts[f"SIGSTOP, SIGCONT after {PAUSED_S:g} s"] += 1
            await asyncio.sleep(PAUSED_S)
            self._signal(pid, signal.SIGCONT)
            await asyncio.sleep(WATCHED_S)
            for fault in (await self._faults_of(slot))[known:]:
                self.troubles.append(f"worker {slot} was taken for dead after a pause of {PAUSED_S:g} s: {fault}")

    async def _faults_of(self, slot: int) -> list[dict[str, Any]]:
        answer = await self._http.get("/faults")
        if answer.status_code != 200:
            self.troubles.append(f"/faults answered {answer.status_code}: {answer.text[:300]}")
            return []
        return [fault for fault in answer.json()["faults"] if fault["slot"] == slot]


def is_there(pid: int) -> bool:
    """Whether the process runs, or is stopped; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Sizes:
    """Scales to any size, and names workers that shall leave."""

    def __init__(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.troubles: list[str] = []
        self._http = http
        self._rng = rng

    async def run(self, end: float) -> None:
        """One operation after the other until `end`; those that meet a fault are rolled back or refused."""
        while now() < end:
            await asyncio.sleep(self._rng.uniform(1.0, 6.0))
            try:
                await self._change(await self._draw())
            except httpx.HTTPError as error:
                self.troubles.append(f"the server did not answer: {error!r}")

    async def _draw(self) -> dict[str, Any]:
        members = (await self._http.get("/topology")).json()["members"]
        slots = [member["slot"] for member in members if member["rank"] is not None]
        if slots and self._rng.random() < 0.3:
            return {"retire": [self._rng.choice(slots)]}
        return {"workers": self._rng.choice((1, 2, 3, 3, MAX_WORKERS, MAX_WORKERS))}

    async def _change(self, fields: dict[str, Any]) -> str:
        """Start an operation and follow it to its end: returns its outcome, or why it was refused."""
        answer = await self._http.post("/scale", json=fields)
        if answer.status_code not in (200, 202):
            outcome = f"refused with {answer.status_code}"
            if answer.status_code not in (400, 409, 503):
                self.troubles.append(f"/scale {fields}: {answer.status_code} {answer.text}")
        else:
            outcome = await self._followed(answer.json())
        self.counts[f"{'retire' if 'retire' in fields else 'scale'}: {outcome}"] += 1
        return outcome

    async def _followed(self, operation: dict[str, Any]) -> str:
        began = now()
        while operation["outcome"] is None and now() - began < OPERATION_S:
            await asyncio.sleep(0.1)
            operation = (await self._http.get(f"/operations/{operation['operation_id']}")).json()
        if operation["outcome"] is None:
            self.troubles.append(f"an operation is not over within {OPERATION_S:g} s: {operation}")
        return str(operation["outcome"])

    async def back_to(self, size: int) -> None:
        """The size as it was, once nothing else goes on any more."""
        began = now()
        while now() - began < BACK_S:
            answer = await self._http.post("/scale", json={"workers": size})
            if answer.status_code == 202:
                await self._followed(answer.json())
            members = (await self._http.get("/topology")).json()["members"]
            if answer.status_code == 200 and [m["state"] for m in members] == ["serving"] * size:
                return
            await asyncio.sleep(0.3)
        self.troubles.append(f"the size is not {size} again within {BACK_S:g} s: {answer.text} {members}")
