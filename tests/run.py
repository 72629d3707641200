"""Runs all tests: those that start deployments one after the other, because they mind the time, then the others side
by side.

    python -m tests.run [options of pytest]

With a path (tests/...) among the options pytest runs as it is.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALONE = ("tests/e2e",)
SIDE_BY_SIDE = ("tests/dist", "tests/gpu", "tests/unit")
NUM_PROCESSES = 2
NOTHING_FOUND = 5


def run(options: Sequence[str]) -> int:
    """The exit code: of the first part that failed, or that nothing was found in either."""
    if any(option.startswith("tests") for option in options):
        return _pytest(options)
    beside = ("-n", str(NUM_PROCESSES), "--dist", "loadfile")
    codes = [_pytest((*options, *ALONE)), _pytest((*options, *beside, *SIDE_BY_SIDE))]
    return next((code for code in codes if code not in (0, NOTHING_FOUND)), min(codes))


def _pytest(options: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
