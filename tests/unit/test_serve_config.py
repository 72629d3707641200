"""The options of `moeray serve`: defaults, limits, and what each part is told."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moeray.comm.errors import CheckpointError, StartupError
from moeray.deploy import checkpoint, ports
from moeray.deploy.cluster import NodeConfig
from moeray.deploy.config import ServeConfig
from moeray.deploy.environment import worker_variables

ROOT = Path(__file__).resolve().parents[2]


def config(**changes: Any) -> ServeConfig:
    return ServeConfig(**({"model": "demo"} | changes))


@pytest.mark.parametrize(
    ("options", "most", "fewest", "seats"),
    [
        ({"workers": 1}, 4, 1, 16),
        ({"workers": 3}, 6, 1, 16),
        ({"workers": 3, "min_workers": 3}, 6, 3, 6),
        ({"workers": 4, "device": "cuda"}, 8, 3, 6),
        ({"workers": 1, "device": "cuda"}, 4, 1, 16),
        ({"workers": 2, "max_workers": 2, "min_workers": 2}, 2, 2, 8),
    ],
)
def test_seats_follow_the_fewest_workers(options: dict[str, Any], most: int, fewest: int, seats: int) -> None:
    chosen = config(**options)
    assert (chosen.most_workers, chosen.fewest_workers) == (most, fewest)
    assert chosen.worker_config(model_path="m", num_experts=16).num_seats == seats


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers is 0, must be at least 1"),
        ({"workers": 3, "max_workers": 2}, "max_workers is 2, must be at least workers"),
        ({"workers": 2, "min_workers": 3}, "min_workers is 3, must be from 1 to workers"),
        ({"port": 70000}, "port is 70000, must be from 0 to 65535"),
        ({"deployment": "a b"}, "deployment is 'a b'"),
        ({"kv_cache_gib": 0.0}, "kv_cache_gib is 0.0, must be more than 0"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s is -1.0, must be at least 0"),
        ({"gpus_per_worker": -1.0}, "gpus_per_worker is -1.0"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**options)


@pytest.mark.parametrize("field", ["dtype", "combine", "dispatcher", "device"])
def test_unknown_choices_are_named_with_the_known_ones(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 'odd', must be one of"):
        config(**{field: "odd"}).worker_config(model_path="m", num_experts=4)


def test_resources_of_a_worker() -> None:
    assert (config().worker_cpus, config().worker_gpus) == (0.0, 0.0)
    assert (config(ray_address="auto").worker_cpus, config(device="cuda").worker_gpus) == (0.01, 1.0)
    assert config(device="cuda", gpus_per_worker=0.5).worker_gpus == 0.5


@pytest.mark.parametrize(
    ("host", "beyond"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True)],
)
def test_loopback_is_known_and_control_beyond_it_needs_a_key(host: str, beyond: bool) -> None:
    assert config(host=host, admin_key="secret").beyond_loopback is beyond
    if beyond:
        with pytest.raises(ValueError, match="beyond loopback: admin_key must be given"):
            config(host=host)


def test_settings_survive_the_way_to_the_front_end() -> None:
    settings = config(api_key="k", served_model_name="name").server_settings(model_path="/m")
    assert type(settings)(**json.loads(json.dumps(dataclasses.asdict(settings)))) == settings
    assert config(model="/some/where/").served_name == "where"


def test_workers_get_their_environment_and_what_the_user_set() -> None:
    variables = worker_variables(threads=3, embedded=False, environ={"NCCL_SOCKET_IFNAME": "eth1", "SECRET": "x"})
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["NCCL_SOCKET_IFNAME"] == "eth1"
    assert "SECRET" not in variables
    assert "GLOO_SOCKET_IFNAME" not in variables
    assert worker_variables(threads=1, embedded=True, environ={})["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_taken_port_is_known_at_once() -> None:
    with ports.listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert ports.url("0.0.0.0", first) == f"http://127.0.0.1:{port}"
        with pytest.raises(StartupError, match=f"port {port} on .* cannot be used: address already in use"):
            ports.listen("127.0.0.1", port)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(StartupError, match=r"host 256\.0\.0\.1"):
        ports.listen("256.0.0.1", 0)


def checkpoint_at(path: Path, *, shards: tuple[str, ...] = ("model.safetensors",)) -> Path:
    path.mkdir()
    demo = json.loads((ROOT / "deploy" / "demo" / "model" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(demo))
    (path / "tokenizer.json").write_text("{}")
    for shard in shards:
        (path / shard).touch()
    return path


def test_a_whole_checkpoint_passes(tmp_path: Path) -> None:
    path = checkpoint_at(tmp_path / "m")
    assert checkpoint.resolve(str(path)) == path
    assert checkpoint.inspect(path).num_experts == 16


def test_the_demo_is_packaged() -> None:
    decoder = checkpoint.inspect(checkpoint.resolve("demo"))
    assert (decoder.num_experts, decoder.moe.top_k) == (16, 4)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    path = checkpoint_at(tmp_path / "m")
    (path / missing).unlink()
    with pytest.raises(CheckpointError, match=missing.replace("model.", "")):
        checkpoint.inspect(path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = checkpoint_at(tmp_path / "m", shards=("a.safetensors",))
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing"):
        checkpoint.inspect(path)
    (path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an index of weights"):
        checkpoint.inspect(path)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "no such", "a/b/c"])
def test_what_is_neither_directory_nor_hub_name_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        checkpoint.resolve(name)


def test_a_hub_name_without_a_way_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="nobody/nothing: no such directory, not in the hub's cache"):
        checkpoint.resolve("nobody/nothing")


def test_node_commands() -> None:
    head = NodeConfig(port=7000, node_ip="10.0.0.1", num_gpus=2).command()
    assert {"--head", "--port=7000", "--node-ip-address=10.0.0.1", "--num-gpus=2"} <= set(head)
    assert "--disable-usage-stats" in head
    joined = NodeConfig(join="10.0.0.1:7000").command()
    assert "--address=10.0.0.1:7000" in joined
    assert "--head" not in joined
    for options in ({"port": 0}, {"join": "nohost"}, {"name": "a/b"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            NodeConfig(**options)
