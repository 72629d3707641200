"""Text to token ids and back, from the checkpoint's own files, through the `tokenizers` library alone.

transformers' AutoTokenizer would load torch into the front end (2 s, 250 MB); `tokenizer.json`,
`tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja` hold all that it would use. Whether a text
gets a BOS token is a matter of tokenizer.json's post-processor, as in transformers 5: `add_bos_token` of the config has
no effect beside it.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from moeray.api.chat_template import ChatTemplate
from moeray.api.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, byte_level_alphabet
from moeray.api.id_tokenizer import IdTokenizer
from moeray.api.token_text import TokenText
from moeray.comm.errors import CheckpointError
from moeray.worker.models.json_object import read_object

TOKENIZER = "tokenizer.json"
# About 2 ms of tokenising: longer texts go to a thread, so that running streams do not wait for them.
MAX_CHARS_ON_LOOP = 4096
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def load_tokenizer(model_path: str) -> TokenText:
    """The checkpoint's tokenizer; without tokenizer.json the one that knows ids only. See `Tokenizer.load`."""
    return Tokenizer.load(model_path) if (Path(model_path) / TOKENIZER).is_file() else IdTokenizer()


class Tokenizer:
    """One checkpoint's tokenizer. Safe to use from several threads: the library's `encode` and `decode` are."""

    has_text = True

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        # A padding or truncation left in tokenizer.json would silently change prompts.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._template = template
        self._added = {id_: token.special for id_, token in backend.get_added_tokens_decoder().items()}
        self._is_byte_level = _is_byte_level(backend)
        self._alphabet = byte_level_alphabet()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, model_path: str) -> "Tokenizer":
        """Read the files of a checkpoint directory; raises `CheckpointError` naming the file."""
        path = Path(model_path) / TOKENIZER
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return cls(backend, _load_template(Path(model_path)))

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def template_variables(self) -> set[str]:
        """What the chat template reads beside the messages; empty without a template."""
        return set() if self._template is None else self._template.variables

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text; long texts are tokenised beside the event loop."""
        if sum(map(len, texts)) <= MAX_CHARS_ON_LOOP:
            return self._encode(texts, add_special_tokens)
        return await asyncio.to_thread(self._encode, texts, add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of the rendered conversation. Raises `ValueError` if there is no template or it refuses."""
        if sum(len(str(message.get("content", ""))) for message in messages) <= MAX_CHARS_ON_LOOP:
            return self._encode_chat(messages, extra)
        return await asyncio.to_thread(self._encode_chat, messages, extra)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the whole sequence."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A fresh incremental decoder that skips special tokens."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._visible_bytes)
        return WindowDetokenizer(self.decode, prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special ones included; empty for an id that the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._piece_bytes(self._backend.id_to_token(token_id))
        return known

    def token_text(self, token_id: int) -> str:
        """One token as logprobs show it: its text, or `bytes:\\xe2\\x82` where it is not whole characters."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if self._added.get(token_id, False) else self.token_bytes(token_id)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # `encode` would hold the interpreter's lock for as long as it takes (1 s per 400k tokens); the batch call does
        # not, and the fast one skips offsets that nobody reads.
        batch = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None) -> list[int]:
        if self._template is None:
            raise ValueError("this model has no chat template, use /v1/completions or /generate")
        # The template writes the special tokens itself.
        return self._encode([self._template.render(messages, extra)], False)[0]

    def _piece_bytes(self, piece: str | None) -> bytes:
        if piece is None:
            return b""
        if self._is_byte_level:
            mapped = [self._alphabet.get(char) for char in piece]
            return piece.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps] == ["ByteLevel"]


def _load_template(folder: Path) -> ChatTemplate | None:
    # Older checkpoints have the special tokens in a file of their own.
    config = {**_read_optional(folder / "special_tokens_map.json"), **_read_optional(folder / "tokenizer_config.json")}
    try:
        source = _template_source(folder, config)
        if source is None:
            return None
        tokens = {name: _token_content(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None}
        return ChatTemplate(source, tokens)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _read_optional(path: Path) -> dict[str, Any]:
    """The object in a JSON file, an empty one if there is no file; raises `CheckpointError` naming it."""
    return read_object(path) if path.is_file() else {}


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The file wins over the config, as in transformers; of several named templates the default one.

    Raises `ValueError` for what is no text.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path.name} is no UTF-8: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        if "default" not in named:
            raise ValueError(f"chat_template has {sorted(map(str, named))}, must have one named 'default'")
        source = named["default"]
    if source is not None and not isinstance(source, str):
        raise ValueError("chat_template is no text")
    return source


def _token_content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
