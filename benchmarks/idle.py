"""What moeray's own processes use of a core while nobody asks for anything: `python -m benchmarks.idle`.

Ray's daemons are not counted. Prints Markdown and writes it into its section of RESULTS.md.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.deployment import Deployment, own_processes
from benchmarks.results import Section


def used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def window(processes: dict[str, psutil.Process], seconds: float) -> dict[str, float]:
    """Percent of one core that each process uses during so many seconds."""
    before, began = {name: used_s(process) for name, process in processes.items()}, time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - began
    return {name: (used_s(process) - before[name]) / elapsed_s * 100 for name, process in processes.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args(argv)
    section = Section("idle")
    options = ["--workers", "2"]
    with tempfile.TemporaryDirectory() as logs, Deployment("demo", options, Path(logs) / "server.log") as server:
        server.post("/generate", {"prompt": "It", "max_tokens": 4})
        time.sleep(2.0)
        processes = own_processes(server)
        shares = [window(processes, arguments.seconds) for _ in range(arguments.windows)]
    totals = [sum(share.values()) for share in shares]
    section.add(
        f"Together {statistics.median(totals):.1f} % of one core (median of {len(totals)} windows of "
        f"{arguments.seconds:g} s, {min(totals):.1f} to {max(totals):.1f}; bar: under 3 %): "
        + ", ".join(f"{name} {statistics.median(share[name] for share in shares):.2f}" for name in processes)
        + "."
    )
    section.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
