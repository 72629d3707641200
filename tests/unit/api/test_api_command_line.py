"""What the command line says in one line: about servers that are none of ours, and about what cannot be sent."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from moeray.deploy.cli import app

PAGE = "<html><body>It works!</body></html>"
COMMANDS = (["status"], ["scale", "2"], ["scale", "1", "--retire", "0"], ["rebalance"], ["generate", "It was"])


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "60", "NO_COLOR": "1"}).invoke(app, arguments)


def failure(*arguments: str) -> str:
    """The one line of a command that fails."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture
def answering() -> Iterator[Callable[[int, str, str], str]]:
    """`answering(status, content_type, body)`: the address of a server that says this to everything."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, content_type: str, body: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.send_response(status)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        (200, "text/html", PAGE),
        (404, "text/html", PAGE),
        (502, "text/html", ""),
        (200, "application/json", "{}"),
        (200, "application/json", "[]"),
        (500, "application/json", '{"error": "odd"}'),
        (200, "text/event-stream", "data: {}\n\n"),
        (200, "text/event-stream", "data: <html>\n\n"),
    ],
)
def test_a_server_that_is_none_of_ours(
    answering: Callable[[int, str, str], str], command: list[str], status: int, content_type: str, body: str
) -> None:
    url = answering(status, content_type, body)
    words = failure(*command, "--url", url)
    assert f"{url} is not a moeray server" in words
    assert f"{status} and {content_type}" in words
    assert "<html>" not in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--temperature", "nan"], "--temperature is nan, must be a finite number"),
        (["generate", "x", "--top-p", "inf"], "--top-p is inf, must be a finite number"),
        (["generate", "a\udcff"], "PROMPT has bytes that are no text"),
        (["generate", "x", "--stop", "\udcff"], "--stop has bytes that are no text"),
        (["generate", "x", "--api-key", "ä"], "--api-key is given, must be printable ASCII"),
        (["status", "--admin-key", "ä"], "--admin-key is given, must be printable ASCII"),
        (["scale", "2", "--deadline-s", "nan"], "--deadline-s is nan, must be a finite number"),
        (["scale", "2", "--deadline-s", "inf"], "--deadline-s is inf, must be a finite number"),
        (["rebalance", "--deadline-s", "nan"], "--deadline-s is nan, must be a finite number"),
        (["scale"], "neither N nor --retire is given"),
    ],
)
def test_what_cannot_be_sent_is_named(arguments: list[str], words: str) -> None:
    assert words in failure(*arguments, "--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--threads", "0"], "--threads is 0, must be at least 1"),
        (["--max-workers", "2", "--workers", "3"], "--max-workers is 2, must be at least --workers (3)"),
        (["--kv-cache-gib", "inf"], "--kv-cache-gib is inf, must be more than 0 and finite"),
        (["--max-queue", "0"], "--max-queue is 0, must be at least 1"),
        (["--max-model-len", "100000"], "--max-model-len is 100000, must be at most the checkpoint's 1024"),
        (["--served-model-name", ""], "--served-model-name is ''"),
        (["--host", ""], "--host is ''"),
        (["--host", "0.0.0.0"], "--admin-key must be given"),
        (["--cpus-per-worker", "1"], "--cpus-per-worker is 1, is for a cluster only (--ray-address)"),
        ([""], "MODEL is ''"),
        (["--recovery-timeout-s", "0"], "--recovery-timeout-s is 0.0, must be more than 0 and finite"),
        (["--stall-timeout-s", "inf"], "--stall-timeout-s is inf, must be at least 0.5 and finite"),
        (["--stall-timeout-s", "0.01"], "--stall-timeout-s is 0.01, must be at least 0.5 and finite"),
        (["--ray-address", "nonsense"], "--ray-address is 'nonsense', must be host:port or auto"),
        (["--attach"], "--ray-address is not given, --attach needs it"),
        (["--attach", "--ray-address", "auto", "--threads", "2"], "--threads is 2, must be left out with --attach"),
    ],
)
def test_options_have_the_names_that_were_typed(arguments: list[str], words: str) -> None:
    assert words in failure("serve", *arguments)


def test_help_names_what_is_done_about_faults() -> None:
    shown = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["serve", "--help"]).output
    for option in ("--recovery-timeout-s", "--stall-timeout-s", "--no-replace", "--attach"):
        assert option in shown


def test_the_line_of_an_operation_is_not_wrapped(start_server: Any) -> None:
    server = start_server(2)
    result = run("scale", "3", "--no-follow", "--url", server.url)
    operation = server.control.running.operation_id
    assert result.stdout.splitlines() == [f"operation {operation}: {server.url}/operations/{operation}"]
