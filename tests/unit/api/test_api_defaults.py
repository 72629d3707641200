"""What requests get that do not say it: the checkpoint's sampling defaults, and ids where there is no tokenizer."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeray.api.defaults import SamplingDefaults
from moeray.comm.errors import CheckpointError
from moeray.worker.messages import SamplingParams, Submit
from tests.unit.api.conftest import Server, Servers

CHECKPOINT = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
REQUESTS = [
    ("/generate", {"prompt": "the"}),
    ("/v1/completions", {"prompt": "the"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}], "max_tokens": 20}),
]


def write(path: Path, config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


# Reading the file


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"eos_token_id": 3, "max_length": 20, "_from_model_config": True}, SamplingDefaults()),
        (CHECKPOINT, SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, SamplingDefaults(temperature=0, top_p=0.9)),
        ({"do_sample": True, "top_k": -1, "min_p": 0.05}, SamplingDefaults(min_p=0.05)),
        ({"max_new_tokens": 77, "temperature": None}, SamplingDefaults(max_tokens=77)),
        ({"num_beams": 4, "typical_p": 1.0}, SamplingDefaults(unsupported=("num_beams=4",))),
    ],
)
def test_fields_of_the_file(tmp_path: Path, config: dict[str, Any], expected: SamplingDefaults) -> None:
    assert SamplingDefaults.read(write(tmp_path, config)) == expected
    assert SamplingDefaults.read(tmp_path, "none") == SamplingDefaults()


def test_no_file_has_no_defaults(tmp_path: Path) -> None:
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "cannot be read"),
        ({"temperature": "hot"}, "temperature is 'hot', must be a number from 0 to 100"),
        ({"top_p": 1.5}, "top_p is 1.5, must be a number from 1e-09 to 1"),
        ({"max_new_tokens": 0.5}, "max_new_tokens is 0.5, must be a whole number from 1"),
        ({"top_k": True}, "top_k is True"),
    ],
)
def test_values_that_no_request_could_have_are_named(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json:? .*{words}|{words}"):
        SamplingDefaults.read(write(tmp_path, config))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "temperature 1"),
        ({"temperature": 0.0, "top_p": 0.5}, "greedy"),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 9},
            "temperature 0.6, top_p 0.9, top_k 20, max_tokens 9",
        ),
    ],
)
def test_defaults_in_words(fields: dict[str, Any], text: str) -> None:
    assert SamplingDefaults(**fields).text() == text


# Serving with them


@pytest.fixture(scope="module")
def checkpoint(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("defaults")
    shutil.copytree(model_path, path, dirs_exist_ok=True)
    return write(path, CHECKPOINT | {"max_new_tokens": 20})


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Server]:
    servers = Servers(checkpoint)
    yield servers.start(1)
    servers.stop()


def sampling(server: Server, path: str, body: dict[str, Any]) -> SamplingParams:
    """How the worker was told to sample this request."""
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return next(message.sampling for message in reversed(server.workers[0].received) if isinstance(message, Submit))


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_request_gets_the_defaults_and_what_it_says(served: Server, path: str, body: dict[str, Any]) -> None:
    def seen(**fields: Any) -> tuple[float, ...]:
        params = sampling(served, path, body | fields)
        return params.temperature, params.top_p, params.top_k, params.repetition_penalty, params.max_tokens

    assert seen() == (0.6, 0.9, 20, 1.1, 20)
    assert seen(temperature=1.3, top_k=0, max_tokens=5) == (1.3, 0.9, 0, 1.1, 5)
    assert seen(temperature=0, top_p=1, repetition_penalty=1)[:2] == (0.0, 1.0)


def test_the_defaults_can_be_left_out(checkpoint: Path) -> None:
    servers = Servers(checkpoint)
    try:
        params = sampling(servers.start(1, generation_config="none"), "/generate", {"prompt": "the"})
    finally:
        servers.stop()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 128)


# Without a tokenizer


@pytest.fixture(scope="module")
def ids_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    servers = Servers(tmp_path_factory.mktemp("no-tokenizer"))
    yield servers.start(1)
    servers.stop()


def test_ids_are_served_without_a_tokenizer(ids_only: Server) -> None:
    greedy = {"max_tokens": 3, "temperature": 0, "logprobs": 1}
    answer = ids_only.post("/generate", {"input_ids": [5, 6, 7], **greedy}).json()
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("", [5, 6, 7], "length")
    body = {"prompt": [[5, 6, 7], [8, 9, 10]], **greedy}
    choices = ids_only.post("/v1/completions", body).json()["choices"]
    assert [(choice["text"], choice["token_ids"]) for choice in choices] == [("", [5, 6, 7]), ("", [8, 9, 10])]
    assert choices[0]["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:7"]
    with ids_only.client() as http, http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    streamed = [(event["choices"][0]["index"], event["choices"][0]["token_ids"]) for event in events]
    assert [token for index, tokens in streamed for token in tokens if index == 0] == [5, 6, 7]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"prompt": "the"}, "prompt"),
        ("/generate", {"input_ids": [1], "stop": "x"}, "stop"),
        ("/v1/completions", {"prompt": "the"}, "prompt"),
        ("/v1/completions", {"prompt": [1], "echo": True}, "echo"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": "the"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/detokenize", {"tokens": [1]}, "tokens"),
    ],
)
def test_text_is_refused_without_a_tokenizer(ids_only: Server, path: str, body: dict[str, Any], param: str) -> None:
    answer: httpx.Response = ids_only.post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "no tokenizer.json, so only token ids are served" in error["message"]
