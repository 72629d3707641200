"""Reading a checkpoint's quantization_config: every key is accounted for or refused by name. No torch here."""

from collections.abc import Mapping
from typing import Any

from moeray.comm.errors import CheckpointError


class QuantOptions:
    """The keys of one JSON object. `where` names it in messages; `finish` refuses what nobody has read."""

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise CheckpointError(f"{where} is {raw!r}, must be an object")
        self._raw = raw
        self._used: set[str] = set()
        self.where = where

    def get(self, name: str, default: Any = None) -> Any:
        """The key's value; `default` if it is absent or null."""
        self._used.add(name)
        value = self._raw.get(name)
        return default if value is None else value

    def require(self, name: str, *allowed: object, optional: bool = True) -> Any:
        """The key's value, which must be one of `allowed`, or absent or null if it is optional."""
        value = self.get(name)
        if value not in (*allowed, *([None] if optional else [])):
            raise self.refusal(name, ", ".join(map(repr, allowed)) or "none")
        return value

    def strings(self, *names: str) -> tuple[str, ...]:
        """The lists of strings under these names, joined."""
        found: list[str] = []
        for name in names:
            values = self.get(name, [])
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise self.refusal(name, "a list of names")
            found += values
        return tuple(found)

    def nested(self, name: str) -> "QuantOptions":
        """The object under this name, which must be there."""
        return QuantOptions(self.get(name), f"{self.where}.{name}")

    def names(self) -> list[str]:
        """All keys."""
        return list(self._raw)

    def refusal(self, name: str, supported: str) -> CheckpointError:
        """The error for a value that is not implemented."""
        value = self._raw.get(name)
        return CheckpointError(f"{self.where}.{name} is {value!r}, which is not implemented (supported: {supported})")

    def finish(self) -> None:
        """Raises `CheckpointError` naming every key that was not read and has a value."""
        empty: tuple[object, ...] = (None, False, {}, [])
        unknown = sorted(name for name in set(self._raw) - self._used if self._raw[name] not in empty)
        if unknown:
            listed = ", ".join(f"{name}={self._raw[name]!r}" for name in unknown)
            raise CheckpointError(f"{self.where} has options that are not implemented: {listed}")
