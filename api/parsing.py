"""From a body's bytes to a request, or to OpenAI's error that names the first field that is wrong."""

import json
import reprlib
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moeray.api.errors import ApiError, invalid

# Listing them costs time, and beyond this the caller knows less by it anyway.
MAX_PROBLEMS = 100

MAX_SHOWN = 60


class _ShortJson(reprlib.Repr):
    """Values in JSON's words, cut short before they are written out: they may be megabytes."""

    def repr_bool(self, value: bool, _level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, _value: None, _level: int) -> str:
        return "null"

    def repr_str(self, value: str, _level: int) -> str:
        shown = value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 3] + "..."
        return json.dumps(shown, ensure_ascii=False)


_SHORT = _ShortJson()
_SHORT.maxother = _SHORT.maxlong = MAX_SHOWN

RequestT = TypeVar("RequestT", bound=BaseModel)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """The request in `body`, or an `ApiError` (400) that names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MAX_PROBLEMS:
            raise invalid(f"the body has {error.error_count()} wrong values or unknown fields") from error
        raise _refusal(error.errors(include_url=False)) from error


def _refusal(problems: list[ErrorDetails]) -> ApiError:
    problem = problems[0]
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "json_invalid":
        return invalid(f"the body is no valid JSON: {context.get('error')}", code="invalid_json")
    if kind == "model_type" and not problem["loc"]:
        return invalid("the body must be a JSON object", code="invalid_json")
    if kind == "size" and not problem["loc"]:
        return invalid(f"the body {problem['msg']}")
    param = str(context.get("field") or _path(problem["loc"]))
    if kind == "one_of":
        return invalid(problem["msg"], param=param)
    explain = _EXPLANATIONS.get(kind)
    if explain is not None:
        return invalid(f"{param} {explain(problem)}", param=param, code=_CODES.get(kind, "invalid_value"))
    text = problem["msg"][:1].lower() + problem["msg"][1:]
    return invalid(f"{param} is {_SHORT.repr(problem['input'])}: {text}", param=param)


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages.0.content`; names of union branches, which pydantic puts into the path, are left out."""
    steps = [str(step) for step in loc]
    return ".".join(step for step in steps if step.isidentifier() or step.isdigit()) or "body"


_CODES = {"extra_forbidden": "unknown_parameter", "unsupported": "unsupported_parameter"}
_EXPLANATIONS: dict[str, Callable[[ErrorDetails], str]] = {
    "extra_forbidden": lambda _: "is not a field of this request",
    "missing": lambda problem: problem["msg"] if "ctx" in problem else "is missing",
    "unsupported": lambda problem: problem["msg"],
    "keys": lambda problem: problem["msg"],
    "size": lambda problem: problem["msg"],
    "range": lambda problem: f"is {_SHORT.repr(problem['input'])}, {problem['msg']}",
}
