"""`moeray scale`, `moeray rebalance` and `moeray status` against a server whose controller does what the test says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from moeray.deploy import client
from moeray.deploy.cli import app
from moeray.deploy.config import ServeConfig
from moeray.deploy.reserved import reserved_text
from moeray.deploy.scale_command import ScaleProgress
from moeray.deploy.supervisor import make_plan
from moeray.elastic.view import ModelView

ALL_PHASES = ("provisioning", "connecting", "transferring", "ready", "switched", "retired")
Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """`run(server, *arguments)`: the command line's answer; its console is wide and no terminal."""
    runner = CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1"})

    def invoke(server: Any, *arguments: str) -> Result:
        return runner.invoke(app, [*arguments, "--url", server.url])

    return invoke


def test_scale_shows_the_phases_and_what_was_moved(start_server: Any, pool: Any, until: Any, run: Run) -> None:
    server = start_server(2)
    result = pool.submit(run, server, "scale", "3")
    until(lambda: server.control.running, "it has begun")
    server.control.go_on("provisioning", "connecting")
    server.control.go_on("transferring", "ready", "switched", "retired", outcome="done")
    answer = result.result(20)
    assert answer.exit_code == 0, answer.output
    for words in ("connecting ...", "2 → 3 workers: done", "epoch 1 → 2", "4 experts to move", "3 KV blocks", "0.500"):
        assert words in answer.output
    assert answer.output.index("provisioning ...") < answer.output.index("retired ...")


def test_a_rollback_is_a_failure_with_the_reason(start_server: Any, pool: Any, until: Any, run: Run) -> None:
    server = start_server(2)
    result = pool.submit(run, server, "scale", "--retire", "0", "--deadline-s", "5")
    until(lambda: server.control.running, "it has begun")
    server.control.go_on("connecting", "rolled_back", outcome="rolled_back", reason="worker 1: was slow")
    answer = result.result(20)
    assert answer.exit_code == 1
    assert "rolled_back: worker 1: was slow" in answer.stderr
    assert "2 → 1 workers: rolled_back" in answer.output
    assert "epoch 1 serves on" in answer.output
    assert server.control.requests[0].retire == (0,)
    assert server.control.requests[0].deadline_s == 5


def test_rebalance_shows_the_same(start_server: Any, pool: Any, until: Any, run: Run) -> None:
    server = start_server(2)
    result = pool.submit(run, server, "rebalance", "--deadline-s", "5")
    until(lambda: server.control.running, "it has begun")
    server.control.go_on(*ALL_PHASES, outcome="done")
    answer = result.result(20)
    assert answer.exit_code == 0, answer.output
    for words in ("connecting ...", "rebalance of 2 workers: done", "epoch 1 → 2", "4 experts to move"):
        assert words in answer.output
    assert server.control.requests[0].deadline_s == 5
    assert run(server, "rebalance", "--no-follow").exit_code == 0
    running = server.control.running.operation_id
    busy = run(server, "rebalance")
    assert busy.exit_code == 1
    assert running in busy.stderr


def test_without_follow_it_returns_at_once(start_server: Any, run: Run) -> None:
    server = start_server(2)
    answer = run(server, "scale", "3", "--no-follow")
    assert answer.exit_code == 0
    running = server.control.running.operation_id
    assert f"/operations/{running}" in answer.output
    busy = run(server, "scale", "4")
    assert busy.exit_code == 1
    assert running in busy.stderr


def test_a_size_beside_slots_must_be_what_is_left(start_server: Any, run: Run) -> None:
    server = start_server(3)
    answer = run(server, "scale", "3", "--retire", "0")
    assert answer.exit_code == 1
    assert "retiring [0] of the serving slots [0, 1, 2] leaves 2" in answer.stderr
    assert run(server, "scale", "2", "--retire", "0", "--no-follow").exit_code == 0
    assert server.control.running.leavers == (0,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["9"], "N is 9, must be from 1 to 4"),
        (["0"], "N is 0, must be from 1 to 4"),
        (["--retire", "7"], "[0, 1]"),
        ([], "neither N nor --retire is given"),
        (["3", "--deadline-s", "0"], "--deadline-s is 0"),
    ],
)
def test_what_the_server_refuses_is_told(server: Any, run: Run, arguments: list[str], words: str) -> None:
    answer = run(server, "scale", *arguments)
    assert answer.exit_code == 1
    assert words in answer.stderr
    assert not server.control.history


def test_no_server_is_told(run: Run) -> None:
    class Nowhere:
        url = "http://127.0.0.1:9"

    answer = run(Nowhere, "scale", "2")
    assert answer.exit_code == 1
    assert "nothing answers" in answer.stderr


def test_the_admin_key_opens_control(start_server: Any, run: Run) -> None:
    server = start_server(2, api_key="secret", admin_key="boss")
    assert "admin key is missing" in run(server, "scale", "3").stderr
    assert run(server, "scale", "3", "--no-follow", "--admin-key", "boss").exit_code == 0
    assert run(server, "status", "--api-key", "secret").exit_code == 1
    assert run(server, "status", "--api-key", "secret", "--admin-key", "boss").exit_code == 0
    assert client.status(server.url, api_key="secret", admin_key="boss")["topology"]["epoch"] == 1


def test_a_terminal_shows_a_line_per_phase(start_server: Any, tmp_path: Path) -> None:
    server = start_server(2)
    with (tmp_path / "screen").open("w+") as screen:
        console = Console(file=screen, force_terminal=True, width=100, color_system=None)
        with ScaleProgress(console) as progress:
            progress.show(server.post("/scale", {"workers": 3, "operation_id": "x"}).json())
            server.control.go_on("provisioning", "connecting")
            progress.show(server.get("/operations/x").json())
        screen.seek(0)
        text = screen.read()
    for words in ("planned", "provisioning", "connecting", "0.50 s"):
        assert words in text


def test_what_a_start_reserves_is_told() -> None:
    config = ServeConfig(model="demo", workers=2, spares=1, min_workers=2)
    plan = make_plan(config)
    decoder = plan.decoder
    assert (plan.server.min_workers, plan.server.max_workers) == (2, 4)
    model = ModelView(
        dtype="fp32",
        weights="fp32",
        combine="exact",
        dispatcher="all_to_all",
        max_model_len=128,
        vocab_size=1,
        eos_token_ids=(),
        num_moe_layers=decoder.num_moe_layers,
        num_experts=decoder.num_experts,
        num_seats=8,
        kv_blocks_per_worker=1,
        weights_bytes_per_worker=1,
        buffer_bytes_per_worker=3 << 20,
        seat_bytes=1 << 20,
        load_s=0.1,
        load_peak_bytes_per_worker=1,
        not_finite=(),
    )
    text = reserved_text(config, model)
    for words in ("2 workers, 1 spare, may become 2 to 4", "8 seats a layer for experts, 8.0 MiB", "3.0 MiB of"):
        assert words in text
    with pytest.raises(ValueError, match="spares is 5"):
        ServeConfig(model="demo", workers=2, spares=5)
