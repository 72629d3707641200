"""Token ids to text, one at a time: never half a character, and together exactly the decode of the whole.

Byte-level vocabularies (GPT-2's alphabet: Qwen, DeepSeek, gpt-oss, Llama 3) are decoded here byte by byte,
because then each token costs one table look-up and equality holds for any sequence, broken UTF-8 included.
Everything else goes through the tokenizer's own decoder over a small window of tokens (the scheme of
text-generation-inference and vLLM).
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so with byte tokens more than this many cannot be one unfinished
# character.
MAX_HELD_TOKENS = 4
WINDOW_CONTEXT_TOKENS = 5


class Detokenizer(Protocol):
    """Text of one sequence as its tokens arrive."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""

    def flush(self) -> str:
        """What is left at the end: an unfinished character becomes U+FFFD."""


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from the printable characters in the vocabulary to the bytes that they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet


class ByteLevelDetokenizer:
    """Joins the tokens' bytes and decodes UTF-8 as it goes, the way Rust's `from_utf8_lossy` decodes the whole."""

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes` gives a token's bytes, none for tokens that are skipped."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Decodes the last few tokens with and without the new ones; the difference is the new text.

    The end of the prompt is the first context: decoders that strip a leading space would else glue words
    together.
    """

    __slots__ = ("_decode", "_ids", "_num_read", "_read_text")

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-WINDOW_CONTEXT_TOKENS:])
        self._num_read = len(self._ids)
        self._read_text = decode(self._ids) if self._ids else ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        num_held = len(self._ids) - self._num_read
        if len(text) <= len(self._read_text) or (text.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        if self._num_read == len(self._ids):
            return ""
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new_text = text[len(self._read_text) :]
        del self._ids[: self._num_read]
        self._num_read = len(self._ids)
        self._read_text = self._decode(self._ids)
        return new_text
