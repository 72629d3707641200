"""The options of `moeray serve`: defaults, limits, and what each part is told."""

import contextlib
import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from moeray.comm.errors import CheckpointError, StartupError
from moeray.deploy import checkpoint, ports
from moeray.deploy.cluster import NodeConfig, check_answers, connection_variables
from moeray.deploy.config import ServeConfig, num_usable_cpus
from moeray.deploy.environment import worker_variables
from moeray.deploy.loading import loaded_text, not_finite_text
from moeray.deploy.options import in_typed_names
from moeray.deploy.supervisor import make_plan
from moeray.elastic.view import ModelView

DEMO_PATH = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "model"


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
        ({"kv_cache_gib": float("inf")}, "kv_cache_gib is inf, must be more than 0 and finite"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s is nan, must be at least 0"),
        ({"threads": 10_000}, f"threads is 10000, must be at most {num_usable_cpus()}"),
        ({"cpus_per_worker": 2.0}, "cpus_per_worker is 2, is for a cluster only"),
        ({"served_model_name": ""}, "served_model_name is ''"),
        ({"model": ""}, "model is ''"),
        ({"host": ""}, "host is ''"),
        ({"recovery_timeout_s": 0.0}, "recovery_timeout_s is 0.0, must be more than 0 and finite"),
        ({"recovery_timeout_s": float("nan")}, "recovery_timeout_s is nan, must be more than 0 and finite"),
        ({"stall_timeout_s": -1.0}, "stall_timeout_s is -1.0, must be at least 0.5 and finite"),
        ({"kv_cache_gib": 1e-12}, "kv_cache_gib is 1e-12, must be at least a byte"),
        ({"attach": True}, "ray_address is not given, --attach needs it"),
        ({"attach": True, "ray_address": "auto", "dtype": "bf16"}, "dtype is bf16, must be left out with --attach"),
        ({"attach": True, "ray_address": "auto", "replace": False}, "replace is False, must be left out with --attach"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**options)


@pytest.mark.parametrize("field", ["dtype", "combine", "dispatcher", "device", "model_impl"])
def test_unknown_choices_are_named_with_the_known_ones(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 'odd', must be one of"):
        config(**{field: "odd"}).worker_config(model_path="m", num_experts=4)


def test_a_clusters_nodes_may_have_more_than_this_machine() -> None:
    assert config(ray_address="auto", threads=10_000, cpus_per_worker=2.0).worker_cpus == 2.0


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("max_workers is 2, must be at least workers (3)", "--max-workers is 2, must be at least N (3)"),
        ("must be from 1 to 4 workers (max_workers)", "must be from 1 to 4 workers (--max-workers)"),
        ("num_threads is 0", "--threads is 0"),
        ("served_name is ''", "served_name is ''"),
        ("deployment is 'max_workers', of /a/max_workers", "deployment is 'max_workers', of /a/max_workers"),
        ("--workers is 0, 3 workers wait, the workers end", "--workers is 0, 3 workers wait, the workers end"),
    ],
)
def test_fields_are_told_as_they_were_typed(message: str, told: str) -> None:
    names = {"workers": "N", "max_workers": "--max-workers", "threads": "--threads"}
    assert in_typed_names(message, names) == told


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
    settings = config(api_key="k", served_model_name="name", generation_config="none").server_settings(model_path="/m")
    assert type(settings)(**json.loads(json.dumps(dataclasses.asdict(settings)))) == settings
    assert settings.generation_config == "none"
    assert config(model="/some/where/").served_name == "where"
    with pytest.raises(ValueError, match="generation_config is 'odd', must be one of auto, none"):
        config(generation_config="odd").server_settings(model_path="/m")


def test_what_a_fault_means_reaches_front_end_and_controller() -> None:
    chosen = config(recovery_timeout_s=7.0, stall_timeout_s=2.5, replace=False)
    assert chosen.server_settings(model_path="/m").recovery_timeout_s == 7.0
    worker = chosen.worker_config(model_path="m", num_experts=4)
    controller = chosen.controller_config(worker, num_layers=1, num_experts=4)
    assert (controller.stall_timeout_s, controller.replace) == (2.5, False)
    assert make_plan(config()).controller.replace


def test_a_front_end_alone_may_be_told_what_it_needs() -> None:
    options = {
        "port": 0,
        "generation_config": "none",
        "max_queue": 5,
        "max_num_seqs": 3,
        "max_workers": 9,
        "recovery_timeout_s": 2.0,
    }
    settings = config(attach=True, ray_address="auto", **options).server_settings(model_path="/m")
    assert (settings.max_queue, settings.max_inflight_per_worker, settings.max_workers) == (5, 3, 9)
    with pytest.raises(CheckpointError, match=r"MODEL has num_experts 16, what deployment 'x' serves has 17"):
        checkpoint.check_served(checkpoint.inspect(DEMO_PATH), served(num_experts=17), "x")
    checkpoint.check_served(checkpoint.inspect(DEMO_PATH), served(), "x")


def served(**changes: Any) -> ModelView:
    """What a deployment of the demo tells of its model."""
    decoder = checkpoint.inspect(DEMO_PATH)
    values: dict[str, Any] = {name: getattr(decoder, name) for name in ("num_moe_layers", "num_experts", "vocab_size")}
    per_worker = ("kv_blocks_per_worker", "weights_bytes_per_worker", "buffer_bytes_per_worker")
    others = (*per_worker, "load_peak_bytes_per_worker", "num_seats", "seat_bytes", "load_s")
    values |= dict.fromkeys(("dtype", "weights", "combine", "dispatcher"), "?") | dict.fromkeys(others, 1)
    return ModelView(**(values | {"max_model_len": 1024, "eos_token_ids": (), "not_finite": ()} | changes))


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
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_bytes((DEMO_PATH / name).read_bytes())
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


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    path = checkpoint_at(tmp_path / "m")
    (path / missing).unlink()
    with pytest.raises(CheckpointError, match=missing.replace("model.", "")):
        checkpoint.inspect(path)


def test_broken_text_files_are_named_before_anything_starts(tmp_path: Path) -> None:
    path = checkpoint_at(tmp_path / "m")
    (path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    with pytest.raises(CheckpointError, match="chat_template does not compile"):
        make_plan(config(model=str(path)))
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        make_plan(config(model=str(path)))
    (path / "tokenizer.json").unlink()
    (path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json holds list, must hold an object"):
        make_plan(config(model=str(path)))


def test_what_a_checkpoint_asks_for_and_lacks_is_told(tmp_path: Path) -> None:
    path = checkpoint_at(tmp_path / "m")
    told = checkpoint.notes(path, "auto")
    assert told.has_text
    assert told.lines == ("Requests that do not say it otherwise: temperature 1.",)
    (path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert checkpoint.notes(path, "auto") == told
    (path / "tokenizer.json").unlink()
    (path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "num_beams": 4}')
    sampling, unsupported, ids_only = checkpoint.notes(path, "auto").lines
    assert "temperature 0.6, top_k 20 (generation_config.json; --generation-config none" in sampling
    assert unsupported == "generation_config.json has settings without effect here: num_beams=4."
    assert "no tokenizer.json, so only token ids are served" in ids_only
    sampling, _ = checkpoint.notes(path, "none").lines
    assert sampling == "Requests that do not say it otherwise: temperature 1 (generation_config.json left out)."


def test_weights_that_are_no_numbers_are_told_once() -> None:
    model = served(not_finite=tuple(f"t{number}" for number in range(7)))
    assert not_finite_text(model).startswith("The checkpoint has NaNs or infinities in t0, t1, t2, t3, t4 and 2 more")
    model = served(load_s=2.5, weights_bytes_per_worker=10 << 20, load_peak_bytes_per_worker=11 << 20)
    assert "10.0 MiB of weights in 2.5 s, with at most 11.0 MiB" in loaded_text(model)


def test_a_length_beyond_the_checkpoints_is_known_before_anything_starts() -> None:
    limit = checkpoint.inspect(DEMO_PATH).max_position_embeddings
    assert make_plan(config(max_model_len=limit)).controller.num_workers == 1
    with pytest.raises(ValueError, match=f"max_model_len is {limit + 1}, must be at most the checkpoint's {limit}"):
        make_plan(config(max_model_len=limit + 1))


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


def test_a_hub_name_in_the_cache_needs_no_way_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some--model"
    snapshot = checkpoint_at(cached / "snapshots" / "c0ffee")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c0ffee")
    assert checkpoint.resolve("some/model") == snapshot
    assert checkpoint.inspect(snapshot).num_experts == 16


@pytest.mark.parametrize("address", ["nohost", ":6379", "host:", "host:port", "host:0", "host:65536", "local"])
def test_an_address_of_ray_is_host_and_port(address: str) -> None:
    with pytest.raises(ValueError, match=f"ray_address is '{address}', must be host:port or auto"):
        config(ray_address=address)


def test_a_token_that_is_there_is_shown_unless_somebody_chose_otherwise(tmp_path: Path) -> None:
    token = tmp_path / "token"
    named = {"RAY_AUTH_TOKEN_PATH": str(token)}
    assert "RAY_AUTH_MODE" not in connection_variables(named)
    token.write_text("secret")
    assert connection_variables(named)["RAY_AUTH_MODE"] == "token"
    assert connection_variables({"RAY_AUTH_TOKEN": "secret"})["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_MODE" not in connection_variables(named | {"RAY_AUTH_MODE": "disabled"})


def test_an_address_where_nothing_listens_is_known_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        check_answers(address)
    with pytest.raises(StartupError, match=f"no way to Ray at {address}: connection refused"):
        check_answers(address)
    with pytest.raises(StartupError, match=r"no way to Ray at 256\.0\.0\.1:1"):
        check_answers("256.0.0.1:1")


def test_a_host_that_does_not_answer_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(4):  # what is beyond the backlog gets no answer
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(listener.getsockname())
        with pytest.raises(StartupError, match=r"no answer within 0\.2 s"):
            check_answers(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2)


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
