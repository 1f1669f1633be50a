"""Settings: how frozen configuration classes check themselves and are built from plain nested values.

Owns: bounds kept beside the field, checks by type hint, unknown keys refused by name. Knows nothing of any particular
setting. Used by the configuration classes of the engine and of the processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from ..ipc.errors import ConfigError


def bounded(default: Any, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field with its bound kept beside it, so that checks, docs and error messages read the same numbers."""
    return field(default=default, metadata={"low": low, "high": high, "choices": choices})


class Checked:
    """Checks every field against its own metadata; parts check themselves."""

    def __post_init__(self) -> None:
        hints = _hints_of(type(self))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if not is_dataclass(value):
                check(item.name, value, hints[item.name], item.metadata)


def check(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> None:
    """Raise ConfigError, with name, value and bound, unless `value` fits its type hint and bound."""
    kinds = get_args(hint) or (hint,)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (isinstance(value, kinds) or (float in kinds and is_number)) or (
        isinstance(value, bool) and bool not in kinds
    ):
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(name, f"is {value!r}; must be {expected}")
    if metadata.get("choices") and value not in metadata["choices"]:
        raise ConfigError(name, f"is {value!r}; must be one of {', '.join(metadata['choices'])}")
    low, high = metadata.get("low"), metadata.get("high")
    if is_number and low is not None and not low <= value <= high:
        raise ConfigError(name, f"is {value!r}; must be in [{low}, {high}]")


def from_dict(kind: type, values: Mapping[str, Any], prefix: str) -> Any:
    """Build a configuration class from nested mappings; an unknown key is refused with its dotted name (P4)."""
    known = {item.name: item for item in fields(kind)}
    hints = _hints_of(kind)
    arguments = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(prefix + key, f"is no known key; known are {', '.join(known)}")
        if known[key].default_factory is not MISSING:
            if not isinstance(value, Mapping):
                raise ConfigError(
                    prefix + key, f"is {value!r}; must be a table of {', '.join(_hints_of(hints[key]))}"
                )
            value = from_dict(hints[key], value, f"{prefix}{key}.")
        arguments[key] = value
    try:
        return kind(**arguments)
    except ConfigError as error:
        raise ConfigError(prefix + error.field, str(error).removeprefix(f"{error.field}: ")) from None


def to_dict(part: Any) -> dict[str, Any]:
    """Nested plain values, the inverse of `from_dict`."""
    values = {item.name: getattr(part, item.name) for item in fields(part)}
    return {name: to_dict(value) if is_dataclass(value) else value for name, value in values.items()}


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    """Type hints by field name. Kept, since annotations are strings in the sources and take long to evaluate."""
    return get_type_hints(kind)
