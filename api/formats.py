"""How answers look on the wire: what every format shares, and the plain one of /generate.

Chunks of a stream are put together from bytes (a prefix made once per choice, the text as JSON, a suffix),
because a model object per chunk costs more than all the rest of the front end.
"""

from typing import Any, Protocol

import msgspec

from moeray.api.ledger import Delta, RequestEntry, SequenceEntry, TokenLogprob, Usage

DONE_EVENT = b"data: [DONE]\n\n"
# JSON has no infinity; OpenAI shows impossible tokens with this value.
LOWEST_LOGPROB = -9999.0

encode_json = msgspec.json.encode


class Format(Protocol):
    """One kind of answer to one request."""

    def whole(self, request: RequestEntry) -> bytes:
        """The body of an answer that is not streamed; every sequence still has all of its delta."""

    def chunk(self, sequence: SequenceEntry, delta: Delta) -> bytes:
        """Server-sent events for what is new in one sequence."""

    def tail(self, request: RequestEntry) -> bytes:
        """Events after the last chunk, before `[DONE]`."""


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def shown_logprob(value: float) -> float:
    return value if value > LOWEST_LOGPROB else LOWEST_LOGPROB


class GenerateFormat:
    """`{"text", "token_ids", "finish_reason", "usage", "request_id"}`, and `logprobs` if they were asked for."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs

    def whole(self, request: RequestEntry) -> bytes:
        delta = request.sequences[0].take_delta() or Delta()
        body = {
            **self._fields(delta),
            "usage": usage_fields(request.usage()),
            "request_id": request.request_id,
        }
        return encode_json(body)

    def chunk(self, sequence: SequenceEntry, delta: Delta) -> bytes:
        fields = {"index": sequence.choice, **self._fields(delta)}
        if delta.finish_reason is not None:
            fields["usage"] = usage_fields(sequence.request.usage())
            fields["request_id"] = sequence.request.request_id
        return event(encode_json(fields))

    def tail(self, request: RequestEntry) -> bytes:  # noqa: ARG002 (the last chunk says it all)
        return b""

    def _fields(self, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "text": delta.text,
            "token_ids": delta.token_ids,
            "finish_reason": delta.finish_reason,
        }
        if self._with_logprobs:
            fields["logprobs"] = [_plain_logprob(entry) for entry in delta.logprobs]
        return fields


def _plain_logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": shown_logprob(value)} for token, value in entry.top]
    return {"token_id": entry.token_id, "logprob": shown_logprob(entry.logprob), "top_logprobs": top}
