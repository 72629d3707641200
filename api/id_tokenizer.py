"""In the place of a tokenizer where the checkpoint has none: token ids are served, text is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from moeray.api.detokenizer import Detokenizer

IDS_ONLY = (
    "this checkpoint has no tokenizer.json, so only token ids are served "
    "(input_ids of /generate, prompt of /v1/completions as a list of ids)"
)


class _NoText:
    def push(self, token_id: int) -> str:  # noqa: ARG002
        return ""

    def flush(self) -> str:
        return ""


class IdTokenizer:
    """All text is empty. What would need a tokenizer raises `ValueError` that says why."""

    has_text = False
    vocab_size = 0

    @property
    def template_variables(self) -> set[str]:
        return set()

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:  # noqa: ARG002
        raise ValueError(IDS_ONLY)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],  # noqa: ARG002
        extra: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> list[int]:
        raise ValueError(IDS_ONLY)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return ""

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:  # noqa: ARG002
        return _NoText()

    def token_bytes(self, token_id: int) -> bytes:  # noqa: ARG002
        return b""

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"
