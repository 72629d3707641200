"""The official `openai` client, unmodified, against a real server."""

from typing import Any

import openai
import pytest


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_completion_counts_and_repeats(client: openai.OpenAI) -> None:
    text = "the quick brown fox"
    answer = client.completions.create(model="tiny", prompt=text, max_tokens=4, temperature=0)
    assert text.startswith(answer.choices[0].text)
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4


def test_default_max_tokens_of_completions_is_16(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the quick", temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "the lazy dog"}], max_tokens=30, temperature=0
    )
    assert answer.choices[0].message.role == "assistant"
    assert (answer.choices[0].message.content or "").startswith("user: the lazy dog\nassistant: ")


def test_chat_fills_the_model_length_by_default(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "dog"}], temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256


@pytest.mark.parametrize("include_usage", [True, False])
def test_completion_stream_equals_the_whole(client: openai.OpenAI, include_usage: bool) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": "héllo 你好 wörld",
        "max_tokens": 20,
        "temperature": 0,
    }
    create: Any = client.completions.create
    whole = create(**fields)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(create(**fields, stream=True, **options))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in reasons if reason] == ["length"]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert usages == ([whole.usage] if include_usage else [])
    if include_usage:
        assert chunks[-1].choices == []


def test_chat_stream_says_the_role_first(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "the lazy dog"}],
            max_completion_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "user: the".startswith("".join(c.delta.content or "" for k in chunks for c in k.choices)[:9])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_n_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def texts(**fields: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt="the", max_tokens=8, n=2, **fields)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16
        return [choice.text for choice in answer.choices]

    first = texts(seed=5)
    assert first[0] != first[1]
    assert texts(seed=5) == first
    assert texts(seed=6) != first
    assert texts() != texts()


def test_prompt_lists_keep_their_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["the quick", "lazy dog"], n=2, max_tokens=1, temperature=0, echo=True
    )
    starts = ["the quick", "the quick", "lazy dog", "lazy dog"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, start in zip(answer.choices, starts, strict=True):
        assert choice.text.startswith(start)
        assert len(choice.text) > len(start)


def test_stop_string_cuts_the_answer_and_frees_the_worker(client: openai.OpenAI, server: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt="the quick brown fox", max_tokens=200, temperature=0, stop=["own f", "zzz"]
    )
    assert answer.choices[0].text == "the quick br"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 12
    assert not any(worker.running for worker in server.workers)


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the quick", max_tokens=3, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the quick"}],
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer: Any = client.chat.completions.create(**fields, stream=stream)
    if stream:
        entries = [e for k in answer for c in k.choices if c.logprobs for e in c.logprobs.content or []]
    else:
        entries = answer.choices[0].logprobs.content
    assert len(entries) == 3
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "".join(e.token for e in entries)
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in entries)


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    create: Any = client.completions.create
    for fields, param in (
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 256}, "max_tokens"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"extra_body": {"beam": 3}}, "beam"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"extra_body": {"min_tokens": 17}}, "min_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            create(**{"model": "tiny", "prompt": "the", **fields})
        assert caught.value.param == param, caught.value
        assert param in caught.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="other", prompt="the")
    assert unknown.value.code == "model_not_found"


def test_template_refusal_is_the_clients_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the user speaks first"):
        client.chat.completions.create(model="tiny", messages=[{"role": "assistant", "content": "hi"}])


def test_exactly_the_model_length_is_accepted(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[300] * 200, max_tokens=56, temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[300] * 200, max_tokens=57, temperature=0)
    assert caught.value.code == "context_length_exceeded"
    assert "257" in caught.value.message
    assert "256" in caught.value.message
