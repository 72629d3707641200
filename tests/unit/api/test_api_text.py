"""Text in and out: stop strings, incremental decoding, chat templates."""

import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from tokenizers.processors import TemplateProcessing

from moeray.api.chat_template import ChatTemplate
from moeray.api.detokenizer import WindowDetokenizer, byte_level_alphabet
from moeray.api.stop import StopMatcher
from moeray.api.tokenizer import Tokenizer, load_tokenizer
from moeray.comm.errors import CheckpointError

# Stop strings


def run_matcher(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """What is sent when the text comes in pieces, and what matched."""
    matcher = StopMatcher(stops, include=include)
    sent = ""
    for piece in pieces:
        sent += matcher.push(piece)
        if matcher.matched is not None:
            return sent, matcher.matched
    return sent + matcher.flush(), None


def reference_match(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Character by character, as slow as it is obvious."""
    for end in range(1, len(text) + 1):
        found = sorted((stop for stop in stops if text[:end].endswith(stop)), key=len)
        if found:
            return text[: end if include else end - len(found[-1])], found[-1]
    return text, None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run_matcher(pieces, stops, include=include) == reference_match("".join(pieces), stops, include=include)


def test_text_is_held_only_while_it_may_be_a_stop_string() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("a <") == "a "
    assert matcher.push("/e") == ""
    assert matcher.push("x") == "</ex"
    assert matcher.push("y</end") == "y"
    assert matcher.flush() == "</end"
    assert matcher.matched is None


def test_a_stop_string_completed_too_early_does_not_count() -> None:
    matcher = StopMatcher(["ab", "abc"])
    assert matcher.push("ab", armed=False) == ""
    assert matcher.push("d") == "abd"
    assert matcher.push("xab") == "x"
    assert matcher.matched == "ab"


# Incremental decoding


def id_of(backend: tokenizers.Tokenizer, piece: str) -> int:
    id_ = backend.token_to_id(piece)
    assert id_ is not None, piece
    return id_


def byte_ids(tokenizer: Tokenizer, raw: Iterable[int]) -> list[int]:
    """The tokens that stand for single bytes."""
    chars = {byte: char for char, byte in byte_level_alphabet().items()}
    return [id_of(tokenizer._backend, chars[byte]) for byte in raw]


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.load(str(model_path))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(raw=st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0x41, 0xFF, 0xC3, 0xED, 0xA0, 0xF4])))
def test_bytes_in_any_order_equal_the_full_decode(tokenizer: Tokenizer, raw: list[int]) -> None:
    ids = byte_ids(tokenizer, raw)
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


def test_random_tokens_equal_the_full_decode(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(200))]
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.push(token) for token in ids]
        assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


def test_half_a_character_is_never_sent(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in byte_ids(tokenizer, "a😀b".encode())]
    assert pieces == ["a", "", "", "", "😀", "b"]


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Words with a marker for the space, and byte tokens for the rest, as in Llama 2 and Mixtral."""
    words = ["<unk>", "<s>", "\u2581the", "\u2581dog", "s", ","]
    vocab = {piece: id_ for id_, piece in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_sentencepiece_keeps_the_space_after_the_prompt() -> None:
    backend = sentencepiece_like()
    tokenizer = Tokenizer(backend, None)
    the, dog, plural = (id_of(backend, piece) for piece in ("\u2581the", "\u2581dog", "s"))
    snail = [id_of(backend, f"<0x{byte:02X}>") for byte in "🐌".encode()]
    ids = [dog, plural, *snail, the]
    alone, after_prompt = tokenizer.detokenizer(), tokenizer.detokenizer([the])
    assert isinstance(alone, WindowDetokenizer)
    assert [alone.push(token) for token in ids] == ["dog", "s", "", "", "", "🐌", " the"]
    assert "".join(map(after_prompt.push, ids)) == " dogs🐌 the"
    half = tokenizer.detokenizer()
    assert half.push(snail[0]) == ""
    assert half.flush() == "\ufffd"
    assert tokenizer.token_bytes(snail[0]) == b"\xf0"
    assert tokenizer.token_text(snail[0]) == "bytes:\\xf0"
    assert tokenizer.token_text(the) == " the"


def test_long_prompts_are_tokenised_beside_the_loop(tokenizer: Tokenizer) -> None:
    async def longest_pause() -> float:
        loop = asyncio.get_running_loop()
        job = asyncio.create_task(tokenizer.encode(["héllo the dog. " * 30_000]))
        longest, last = 0.0, loop.time()
        while not job.done():
            await asyncio.sleep(0)
            longest, last = max(longest, loop.time() - last), loop.time()
        assert len(job.result()[0]) > 100_000
        return longest

    assert asyncio.run(longest_pause()) < 0.25


def test_no_tokenizer_is_known_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert not load_tokenizer(str(tmp_path)).has_text
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds list, must hold an object"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is no text"),
        ("special_tokens_map.json", "3", "special_tokens_map.json holds int"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": ""}]}',
            "['rag'], must have",
        ),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat_template does not compile"),
        ("chat_template.jinja", "\udcff", "chat_template.jinja is no UTF-8"),
    ],
)
def test_a_broken_template_is_named(model_path: Path, tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_path / "tokenizer.json").read_bytes())
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=re.escape(words)):
        Tokenizer.load(str(tmp_path))


# Chat templates

TEMPLATES = [
    "{%- for m in messages %}\n  {%- if m.role == 'user' %}\n    <u>{{ m.content | trim }}</u>\n  {%- endif %}\n"
    "{%- endfor %}\n{{ bos_token }}{{ messages | tojson }}",
    "{% set ns = namespace(last='') %}{% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}"
    "{% set ns.last = m['content'] %}{% generation %}{{ ns.last }}{% endgeneration %}{% endfor %}",
    "{{ messages[0].content.split('</think>')[-1].lstrip('\\n') }}{% if tools is none %}none{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_transformers_does(source: str) -> None:
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    messages = [
        {"role": "user", "content": " <a> </think>\nhé 'x' "},
        {"role": "assistant", "content": "b"},
    ] * 2
    extra: dict[str, Any] = {"enable_thinking": False}
    assert ("enable_thinking" in ChatTemplate(source, {}).variables) is ("enable_thinking" in source)
    expected, _ = render([messages], chat_template=source, add_generation_prompt=True, bos_token="<s>", **extra)
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages, extra) == expected[0]


NAMED = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}]


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("has_bos_template", [True, False])
def test_texts_and_chats_are_tokenised_as_transformers_does(
    model_path: Path, tmp_path: Path, where: str, add_bos_token: bool | None, has_bos_template: bool
) -> None:
    transformers = pytest.importorskip("transformers.tokenization_utils_tokenizers")
    backend = tokenizers.Tokenizer.from_file(str(model_path / "tokenizer.json"))
    if has_bos_template:
        end = ("<|end|>", id_of(backend, "<|end|>"))
        backend.post_processor = TemplateProcessing(single="<|end|> $A", pair="$A $B", special_tokens=[end])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": NAMED, "add_bos_token": add_bos_token}
    tokens = {"bos_token": {"content": "<|end|>", "__type": "AddedToken"}, "eos_token": "<|end|>"}
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {name: value for name, value in config.items() if value is not None}
    }
    files.setdefault(where, {}).update(tokens)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    ours, theirs = Tokenizer.load(str(tmp_path)), transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "the dog"}]
    assert asyncio.run(ours.encode(["the dog"]))[0] == theirs("the dog").input_ids
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert asyncio.run(ours.encode_chat(messages)) == chat
    assert chat[0] == id_of(backend, "<|end|>")


def test_a_template_cannot_reach_python_and_its_failures_are_values() -> None:
    messages = [{"role": "user", "content": "x"}]
    for source in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 // 0 }}"):
        with pytest.raises(ValueError, match="the chat template refused the messages"):
            ChatTemplate(source, {}).render(messages)
    with pytest.raises(ValueError, match="does not read"):
        ChatTemplate("{{ messages[0].content }}", {}).render([{**messages[0], "name": "Ada"}])
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_the_server_loads_neither_torch_nor_transformers_nor_ray() -> None:
    code = "import sys, moeray.api.server; sys.exit(' '.join({'torch', 'transformers', 'ray'} & set(sys.modules)) or 0)"
    src = str(Path(__file__).parents[3] / "src")
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": src}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
