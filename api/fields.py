"""The types of request fields: strict, with ranges whose messages name the limits."""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_ENTRIES = 1024
MAX_PROMPTS = 4096
MAX_INT32 = (1 << 31) - 1
MAX_SEED = (1 << 63) - 1


def within(low: float, high: float) -> AfterValidator:
    """A range whose message names both limits."""

    def check(value: float) -> float:
        if not low <= value <= high:
            raise PydanticCustomError("range", f"must be from {low} to {high}")
        return value

    return AfterValidator(check)


def check_stop(stop: str | list[str]) -> str | list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS or any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        message = f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters"
        raise PydanticCustomError("range", message)
    return stop


def few_entries(value: object) -> object:
    """Before the entries are looked at one by one: not more than a request can mean."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError("size", f"must have at most {MAX_ENTRIES} entries, has {len(value)}")
    return value


def check_logit_bias(bias: dict[str, float]) -> dict[str, float]:
    if any(not -100 <= value <= 100 for value in bias.values()):
        raise PydanticCustomError("range", "must have values from -100 to 100")
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
        raise PydanticCustomError("keys", "must have token ids as keys")
    return bias


def _shape(value: object) -> str | None:
    """Which branch of a union a value means, by its first element; tags are no identifiers, see `_path`."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<items>"


def by_shape(expected: str) -> Discriminator:
    return Discriminator(_shape, custom_error_type="range", custom_error_message=f"must be {expected}")


def _stop_shape(value: object) -> str | None:
    return "<texts>" if isinstance(value, list) else _shape(value)


Count = Annotated[int, within(1, MAX_INT32)]
# Checked in pydantic's core, up to the first wrong one: a list may have a million of them.
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
LogitBias = Annotated[dict[str, float], BeforeValidator(few_entries), AfterValidator(check_logit_bias)]
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
Stop = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<texts>")],
    Discriminator(_stop_shape, custom_error_type="range", custom_error_message="must be a string or a list of strings"),
]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<items>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<lists>")],
    by_shape("a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
