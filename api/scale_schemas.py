"""Requests that change size or placement, in moeray's own words and those of other systems' users. Strict, like all."""

from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_DEADLINE_S = 86_400.0
MAX_RETIRED = 4096

OperationId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")]


def _within_a_day(value: float) -> float:
    if not 0 < value <= MAX_DEADLINE_S:
        raise PydanticCustomError("range", f"must be more than 0 and at most {MAX_DEADLINE_S:g}")
    return value


Seconds = Annotated[float, AfterValidator(_within_a_day)]


def _check_only_one(names: tuple[str, str], values: tuple[object, object]) -> None:
    """Both or neither is refused; one that is null was not sent."""
    num_given = sum(value is not None for value in values)
    if num_given != 1:
        message = f"{names[0]} and {names[1]} are {'both' if num_given else 'not'} given, exactly one must be"
        raise PydanticCustomError("one_of", message, {"field": names[0]})


class ScaleFields(BaseModel):
    """POST /scale: how many workers, or which slots leave. The range of both is the controller's to know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    workers: int | None = None
    retire: Annotated[list[int], Field(min_length=1, max_length=MAX_RETIRED, fail_fast=True)] | None = None
    operation_id: OperationId | None = None
    deadline_s: Seconds | None = None

    @model_validator(mode="after")
    def _workers_or_retire(self) -> Self:
        _check_only_one(("workers", "retire"), (self.workers, self.retire))
        return self


class RebalanceFields(BaseModel):
    """POST /rebalance: by which load is the controller's to know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    operation_id: OperationId | None = None
    deadline_s: Seconds | None = None


class ScaleElasticEPFields(BaseModel):
    """POST /scale_elastic_ep: the size under vLLM's name or SGLang's.

    vLLM waits up to `drain_timeout` seconds until no request runs; nothing waits for that here, because requests go
    on while the size changes, so its bound holds whatever it is.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    new_data_parallel_size: int | None = None
    new_ep_size: int | None = None
    drain_timeout: Seconds | None = None

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        _check_only_one(("new_data_parallel_size", "new_ep_size"), (self.new_data_parallel_size, self.new_ep_size))
        return self

    @property
    def size_field(self) -> str:
        """The name under which the size was given."""
        return "new_ep_size" if self.new_data_parallel_size is None else "new_data_parallel_size"

    @property
    def size(self) -> int | None:
        return self.new_ep_size if self.new_data_parallel_size is None else self.new_data_parallel_size
