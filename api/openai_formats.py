"""Answers in the shapes of OpenAI's completions and chat completions, whole and as chunks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from moeray.api.formats import encode_json, event, shown_logprob, usage_fields
from moeray.api.ledger import Delta, RequestEntry, SequenceEntry, TokenLogprob
from moeray.api.token_text import TokenText


class _OpenAIFormat(ABC):
    """What both shapes share: the envelope, usage, and one prefix of bytes per choice."""

    whole_object: str
    chunk_object: str

    def __init__(self, *, id_: str, model: str, tokenizer: TokenText, with_logprobs: bool, include_usage: bool) -> None:
        self._envelope = {"id": id_, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage
        head = encode_json({**self._envelope, "object": self.chunk_object})
        self._head = b"data: " + head[:-1] + b',"choices":['
        # With include_usage every chunk has the field, and only the last one a value.
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def whole(self, request: RequestEntry) -> bytes:
        choices = [self._choice(sequence, sequence.take_delta() or Delta()) for sequence in request.sequences]
        body = {
            **self._envelope,
            "object": self.whole_object,
            "choices": choices,
            "usage": usage_fields(request.usage()),
        }
        return encode_json(body)

    def tail(self, request: RequestEntry) -> bytes:
        if not self._include_usage:
            return b""
        usage = usage_fields(request.usage())
        return event(encode_json({**self._envelope, "object": self.chunk_object, "choices": [], "usage": usage}))

    @abstractmethod
    def _choice(self, sequence: SequenceEntry, delta: Delta) -> dict[str, Any]:
        """One choice of the whole answer."""


class CompletionFormat(_OpenAIFormat):
    """`text_completion`. `echoes` are the texts of the prompts where the request wants them back.

    Without a tokenizer the text is empty, and choices have `token_ids` beside it, as vLLM names them.
    """

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        *,
        id_: str,
        model: str,
        tokenizer: TokenText,
        with_logprobs: bool,
        include_usage: bool,
        echoes: Sequence[str] = (),
        num_choices: int = 1,
    ) -> None:
        super().__init__(
            id_=id_,
            model=model,
            tokenizer=tokenizer,
            with_logprobs=with_logprobs,
            include_usage=include_usage,
        )
        self._echo_of_choice = {
            prompt * num_choices + index: text for prompt, text in enumerate(echoes) for index in range(num_choices)
        }

    def chunk(self, sequence: SequenceEntry, delta: Delta) -> bytes:
        text = self._echo_of_choice.pop(sequence.choice, "") + delta.text
        logprobs = encode_json(self._logprobs(delta)) if self._with_logprobs else b"null"
        return b"".join(
            (
                self._head,
                b'{"index":%d,"text":' % sequence.choice,
                encode_json(text),
                b"" if self._tokenizer.has_text else b',"token_ids":' + encode_json(delta.token_ids),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                encode_json(delta.finish_reason),
                b"}",
                self._end,
            )
        )

    def _choice(self, sequence: SequenceEntry, delta: Delta) -> dict[str, Any]:
        return {
            "index": sequence.choice,
            "text": self._echo_of_choice.get(sequence.choice, "") + delta.text,
            **({} if self._tokenizer.has_text else {"token_ids": delta.token_ids}),
            "logprobs": self._logprobs(delta) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        text = self._tokenizer.token_text
        entries = delta.logprobs
        top = [self._top(entry) for entry in entries]
        return {
            "tokens": [text(entry.token_id) for entry in entries],
            "token_logprobs": [shown_logprob(entry.logprob) for entry in entries],
            "top_logprobs": top if any(top) else None,
            "text_offset": [entry.text_offset for entry in entries],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float] | None:
        """The alternatives by text, and always the token itself; None if none were asked for."""
        if not entry.top:
            return None
        pairs = ((entry.token_id, entry.logprob), *entry.top)
        return {self._tokenizer.token_text(token): shown_logprob(value) for token, value in pairs}


class ChatFormat(_OpenAIFormat):
    """`chat.completion`; the first chunk of each choice says who speaks."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *, id_: str, model: str, tokenizer: TokenText, with_logprobs: bool, include_usage: bool) -> None:
        super().__init__(
            id_=id_,
            model=model,
            tokenizer=tokenizer,
            with_logprobs=with_logprobs,
            include_usage=include_usage,
        )
        self._introduced: set[int] = set()

    def chunk(self, sequence: SequenceEntry, delta: Delta) -> bytes:
        logprobs = encode_json(self._logprobs(delta)) if self._with_logprobs else b"null"
        chunk = b"".join(
            (
                self._head,
                b'{"index":%d,"delta":{"content":' % sequence.choice,
                encode_json(delta.text),
                b'},"logprobs":',
                logprobs,
                b',"finish_reason":',
                encode_json(delta.finish_reason),
                b"}",
                self._end,
            )
        )
        if sequence.choice in self._introduced:
            return chunk
        self._introduced.add(sequence.choice)
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._head + b'{"index":%d,' % sequence.choice + role + self._end + chunk

    def _choice(self, sequence: SequenceEntry, delta: Delta) -> dict[str, Any]:
        return {
            "index": sequence.choice,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return {"content": [self._token(entry) for entry in delta.logprobs], "refusal": None}

    def _token(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._alternative(token, value) for token, value in entry.top]
        return {**self._alternative(entry.token_id, entry.logprob), "top_logprobs": top}

    def _alternative(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": shown_logprob(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
