"""From a request's fields to `SamplingParams`: defaults, and the checks that need the model and the prompt."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from moeray.api.defaults import SamplingDefaults
from moeray.api.errors import invalid
from moeray.api.schemas import SamplingFields
from moeray.elastic.view import ModelView
from moeray.worker.messages import SamplingParams

SMALLEST_TOP_P = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """What a kind of request allows. `prompt_field` is its name for the prompt; a `default_max_tokens` of
    None is as many as fit, else the default is cut to what fits. The checkpoint's own default wins.
    """

    prompt_field: str
    default_max_tokens: int | None


def check_prompt(prompt_ids: Sequence[int], model: ModelView, field: str) -> None:
    """Raises `ApiError` unless there is at least one token and all are in the vocabulary."""
    if not prompt_ids:
        raise invalid(f"{field} is empty, must have at least one token", param=field)
    if max(prompt_ids) >= model.vocab_size:
        raise invalid(f"{field} has token id {max(prompt_ids)}, must be from 0 to {model.vocab_size - 1}", param=field)


def sampling_params(
    fields: SamplingFields,
    *,
    num_prompt_tokens: int,
    model: ModelView,
    limits: PromptLimits,
    defaults: SamplingDefaults,
) -> SamplingParams:
    """How to sample one prompt of a request. Without a seed it gets a random one here, and keeps it.

    Raises `ApiError` (400) that names the field, its value and the limit.
    """
    max_tokens = _max_tokens(fields, num_prompt_tokens, model, limits, defaults)
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(
            f"min_tokens is {min_tokens}, must be at most {fields.limit_field} ({max_tokens})",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(fields.temperature, defaults.temperature),
        top_k=max(0, defaults.top_k if fields.top_k is None else fields.top_k),
        top_p=max(SMALLEST_TOP_P, _or(fields.top_p, defaults.top_p)),
        min_p=_or(fields.min_p, defaults.min_p),
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
        logit_bias=_logit_bias(fields, model),
        logprobs=fields.num_logprobs,
        stop_token_ids=_stop_token_ids(fields, model),
        ignore_eos=bool(fields.ignore_eos),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(
    fields: SamplingFields,
    num_prompt_tokens: int,
    model: ModelView,
    limits: PromptLimits,
    defaults: SamplingDefaults,
) -> int:
    asked = getattr(fields, fields.limit_field)
    room = model.max_model_len - num_prompt_tokens
    if asked is None and room < 1:
        raise invalid(
            f"{limits.prompt_field} has {num_prompt_tokens} tokens, must be at most {model.max_model_len - 1}: "
            f"one less than max_model_len ({model.max_model_len})",
            param=limits.prompt_field,
            code="context_length_exceeded",
        )
    if asked is not None and room < asked:
        raise invalid(
            f"{limits.prompt_field} has {num_prompt_tokens} tokens and {fields.limit_field} is {asked}, "
            f"together {num_prompt_tokens + asked}, must be at most {model.max_model_len} (max_model_len)",
            param=fields.limit_field if room >= 1 else limits.prompt_field,
            code="context_length_exceeded",
        )
    if asked is not None:
        return int(asked)
    default = limits.default_max_tokens if defaults.max_tokens is None else defaults.max_tokens
    return room if default is None else min(room, default)


def _logit_bias(fields: SamplingFields, model: ModelView) -> dict[int, float]:
    bias = {int(token): value for token, value in (fields.logit_bias or {}).items()}
    _check_ids("logit_bias", list(bias), model)
    return bias


def _stop_token_ids(fields: SamplingFields, model: ModelView) -> tuple[int, ...]:
    ids = tuple(fields.stop_token_ids or ())
    _check_ids("stop_token_ids", ids, model)
    return ids


def _check_ids(field: str, ids: Sequence[int], model: ModelView) -> None:
    if ids and max(ids) >= model.vocab_size:
        raise invalid(f"{field} has token id {max(ids)}, must be from 0 to {model.vocab_size - 1}", param=field)
