"""Environment variables that processes of a deployment must have before they start. Nobody else reads or sets any."""

import os
from collections.abc import Mapping
from pathlib import Path

from moeray.comm import faults

# Ray reads these when it is imported. Loopback only, nothing is reported, node death is noticed within a second.
RAY_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    "RAY_AUTH_MODE": "token",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Workers must not lose against whatever else runs; what may be slow in them lowers itself.
    "RAY_worker_niceness": "0",
    # An actor that is killed and does not react, as one that is stopped, gets SIGKILL after this time.
    "RAY_kill_worker_timeout_milliseconds": "100",
    # Statistics of its event loops cost an idle actor a quarter of a percent of a core.
    "RAY_event_stats": "false",
}
RAY_EMBEDDED = RAY_QUIET | {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    # The only node is this host: if it is silent for a while, it was busy, and nobody else could serve. 30 s.
    "RAY_health_check_failure_threshold": "60",
}

# A head without this file in its home asks the cloud's metadata service who it is.
BOOTSTRAP_CONFIG = "cluster_name: x\nprovider: {type: local}\nmax_workers: 0\n"

# glibc reads the MALLOC_ ones at process start: fresh memory costs more than any kernel, so freed memory is kept.
WORKER_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "268435456",
}

# Taken over from the supervisor's environment where they are set, because a node cannot guess them.
PASSED_ON = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_HCA", faults.VARIABLE)


def worker_variables(*, threads: int, embedded: bool, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a worker process needs at its start."""
    variables = WORKER_MEMORY | {
        "OMP_NUM_THREADS": str(threads),
        # A second thread that sleeps between two products costs more than it gains, and one that spins for long takes
        # the core from others: this is a tenth of a millisecond.
        "GOMP_SPINCOUNT": "20000",
        "HF_HUB_OFFLINE": "1",
        # A group's store looks its peers' names up; a lost answer must not hold an operation up for 5 seconds.
        "RES_OPTIONS": "timeout:1 attempts:1",
        "HOME": str(Path.home()),
    }
    if embedded:
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables | {name: environ[name] for name in PASSED_ON if name in environ}


def check_faults(environ: Mapping[str, str] = os.environ) -> None:
    """Raises `ValueError` with file, line and what is allowed if faults are asked for in words that nobody knows."""
    if faults.VARIABLE in environ:
        faults.read(Path(environ[faults.VARIABLE]))


def write_head_home(directory: Path) -> Path:
    """A home directory for the processes of a Ray head."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "ray_bootstrap_config.yaml").write_text(BOOTSTRAP_CONFIG)
    return directory
