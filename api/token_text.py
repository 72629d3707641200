"""What the front end needs of a tokenizer, whether the checkpoint has one or not."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from moeray.api.detokenizer import Detokenizer


class TokenText(Protocol):
    """Text to token ids and back. `has_text` is False where there are only ids: then text in is a `ValueError`."""

    @property
    def has_text(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def template_variables(self) -> set[str]:
        """What the chat template reads beside the messages; empty without a template."""

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of the rendered conversation. Raises `ValueError` if there is no template or it refuses."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the whole sequence; empty without text."""

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A fresh incremental decoder."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that the tokenizer does not know."""

    def token_text(self, token_id: int) -> str:
        """One token as logprobs show it."""
