"""A Ray cluster that `moeray cluster` starts and ends, and deployments in it, as on nodes of one's own."""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moeray.deploy.environment import RAY_EMBEDDED
from tests.support.serving import ROOT, Serve


def moeray(*words: str, token: Path | None = None, within_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, "-m", "moeray.deploy.cli", *words]
    if token is not None:
        command += ["--token-file", str(token)]
    return subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False, env=environment)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Its head's address and the path of the token that lets one in."""

    address: str
    token: Path

    def variables(self) -> dict[str, str]:
        """What the environment of a process needs that connects."""
        return {
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_NUM_REDIS_GET_RETRIES": "3",
            # Without it Ray takes loopback for the address of the first network.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def serve(self, directory: Path, *options: str, token: Path | None = None) -> Serve:
        """`moeray serve demo` in this cluster; with another token it does not get in."""
        variables = Cluster(self.address, token or self.token).variables()
        return Serve(directory, "demo", "--ray-address", self.address, *options, variables=variables)


@contextmanager
def started(name: str, token: Path, *, num_nodes: int = 1, num_cpus: int = 1, num_gpus: int = 0) -> Iterator[Cluster]:
    """Nodes on this host, each with so many CPUs and (pretended) GPUs; nothing of them is left afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    node = ("--node-ip", "127.0.0.1", "--num-cpus", str(num_cpus), "--num-gpus", str(num_gpus), "--name", name)
    try:
        head = moeray("cluster", "start", "--head", "--port", str(port), *node, token=token)
        assert head.returncode == 0, head.stderr
        assert f"--join 127.0.0.1:{port}" in head.stdout
        for _ in range(num_nodes - 1):
            joined = moeray("cluster", "start", "--join", address, *node, token=token)
            assert joined.returncode == 0, joined.stderr
        yield Cluster(address, token)
    finally:
        ended = moeray("cluster", "stop", "--name", name)
    assert ended.returncode == 0, ended.stderr
    assert "processes ended" in ended.stdout
    assert "Nothing runs here" in moeray("cluster", "stop", "--name", name).stdout


@contextmanager
def ray_test_cluster(token: Path, *, num_nodes: int, num_gpus: int) -> Iterator[Cluster]:
    """The same with `ray.cluster_utils.Cluster`, in a process of its own that ends it."""
    token.write_text(secrets.token_hex(32))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= RAY_EMBEDDED | {"RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_nodes", str(num_nodes), str(num_gpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdout:
            yield Cluster(process.stdout.readline().strip(), token)
    finally:
        process.stdin.close()
        process.wait(30.0)
