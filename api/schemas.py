"""Requests as clients send them: OpenAI's completions and chat, and /generate. Strict, and nothing is
ignored.

Every field is honoured or refused by name; the only ones without effect are `NO_EFFECT` below, which describe
the caller and cannot change the output. `parsing.py` turns the first problem into an OpenAI error with its
`param`.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from moeray.api.chat_template import RESERVED_NAMES
from moeray.api.fields import (
    MAX_INT32,
    MAX_SEED,
    MAX_STOPS,
    Count,
    LogitBias,
    Prompt,
    Stop,
    TokenIds,
    by_shape,
    check_stop,
    few_entries,
    within,
)

MAX_MESSAGES = 4096

# Said about the caller, for the provider's own books: they cannot change what is generated.
NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")

# Known to OpenAI's or vLLM's clients and not supported here, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
}


class SamplingFields(BaseModel):
    """What all three ways to generate have in common; None is the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, within(0, MAX_INT32)] | None = None
    temperature: Annotated[float, within(0, 2)] | None = None
    top_p: Annotated[float, within(0, 1)] | None = None
    top_k: Annotated[int, within(-1, MAX_INT32)] | None = None
    min_p: Annotated[float, within(0, 1)] | None = None
    presence_penalty: Annotated[float, within(-2, 2)] | None = None
    frequency_penalty: Annotated[float, within(-2, 2)] | None = None
    repetition_penalty: Annotated[float, within(0.001, 100)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, within(0, MAX_SEED)] | None = None
    stop: Annotated[Stop, AfterValidator(check_stop)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, data: Any) -> Any:
        """Drop what cannot matter, refuse what is not supported; a field that is null was not sent."""
        if not isinstance(few_entries(data), dict):
            return data
        for name, harmless in UNSUPPORTED.items():
            if data.get(name) is not None and data[name] not in harmless:
                raise PydanticCustomError("unsupported", "is not supported by this server", {"field": name})
        dropped = {*NO_EFFECT, *UNSUPPORTED}
        return {name: value for name, value in data.items() if name not in dropped}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def num_logprobs(self) -> int | None:
        return None

    @property
    def limit_field(self) -> str:
        """The name under which the client gave the number of tokens."""
        return "max_tokens"


class GenerateRequest(SamplingFields):
    """POST /generate: one prompt, one answer."""

    prompt: str | None = None
    input_ids: TokenIds | None = None
    logprobs: Annotated[int, within(0, 20)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_answer(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in ("n", "best_of"):
                if name in data:
                    raise PydanticCustomError("unsupported", "belongs to /v1/completions", {"field": name})
            for name in ("prompt", "input_ids"):
                value = data.get(name)
                if isinstance(value, list) and value and isinstance(value[0], str | list):
                    message = "must be one prompt, lists of prompts belong to /v1/completions"
                    raise PydanticCustomError("unsupported", message, {"field": name})
            if (data.get("prompt") is None) == (data.get("input_ids") is None):
                message = "must be given, or input_ids in its place, and not both"
                raise PydanticCustomError("missing", message, {"field": "prompt"})
        return data

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    # A random field against traffic analysis at OpenAI; asking for none is what this server does anyway.
    include_obfuscation: Literal[False] | None = None


class OpenAIFields(SamplingFields):
    """Common to completions and chat."""

    n: Annotated[int, within(1, 128)] | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "OpenAIFields":
        if self.stream_options is not None and not self.stream:
            message = "is allowed with stream true only"
            raise PydanticCustomError("unsupported", message, {"field": "stream_options"})
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(OpenAIFields):
    """POST /v1/completions."""

    prompt: Prompt
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, within(0, 20)] | None = None

    @model_validator(mode="after")
    def _combinations(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.num_choices:
            message = f"must equal n ({self.num_choices}), other values are not supported"
            raise PydanticCustomError("unsupported", message, {"field": "best_of"})
        if self.echo and self.logprobs is not None:
            message = "is not supported together with logprobs"
            raise PydanticCustomError("unsupported", message, {"field": "echo"})
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt, text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [entry for entry in self.prompt if not isinstance(entry, int)]


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["text"]
    text: str


TextParts = Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TextParts, Tag("<items>")],
    by_shape("a string or a list of text parts"),
]


class ChatMessage(BaseModel):
    """One message; fields that are null (as in answers sent back) count as absent.

    `developer` is OpenAI's newer word for `system`, and the one that templates know is used.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(few_entries(data), dict):
            return data
        return {name: value for name, value in data.items() if value is not None}

    def for_template(self) -> dict[str, str]:
        """Plain strings: templates of text models know no content parts."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        fields = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.name is not None:
            fields["name"] = self.name
        if self.reasoning_content is not None:
            fields["reasoning_content"] = self.reasoning_content
        return fields


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(OpenAIFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, within(0, 20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _combinations(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            message = "is allowed with logprobs true only"
            raise PydanticCustomError("unsupported", message, {"field": "top_logprobs"})
        if None not in (self.max_tokens, self.max_completion_tokens):
            message = "is the older name of max_completion_tokens, give one of them"
            raise PydanticCustomError("unsupported", message, {"field": "max_tokens"})
        if reserved := sorted(set(RESERVED_NAMES).intersection(self.chat_template_kwargs or {})):
            message = f"must not have {', '.join(reserved)}"
            raise PydanticCustomError("unsupported", message, {"field": "chat_template_kwargs"})
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_tokens is not None else "max_completion_tokens"


class TokenizeRequest(BaseModel):
    """POST /tokenize."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            message = "must be given, or messages in its place, and not both"
            raise PydanticCustomError("missing", message, {"field": "prompt"})
        if self.messages is not None and self.add_special_tokens is not None:
            message = "is for prompt only, the chat template decides for messages"
            raise PydanticCustomError("unsupported", message, {"field": "add_special_tokens"})
        return self


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None
