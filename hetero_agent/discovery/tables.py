"""Strict reading of TOML tables: each key has one type and one form, unknown keys are errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from hetero_agent.text import printable

LIST_MAX = 256


class ProfileError(ValueError):
    """A profile can't be used; the text names file, table and key, and says what fits."""


def read_toml(content: str, where: str) -> Table:
    """Return the root table of TOML text.  Raises ProfileError naming WHERE."""
    try:
        return Table(tomllib.loads(content), f"{where}:")
    except (ValueError, RecursionError) as error:  # other than TOMLDecodeError: too many digits, or brackets
        raise ProfileError(f"{where}: not TOML: {printable(error)}") from error


class Table:
    """One table of which every key is asked for once; `done` refuses the rest.

    WHERE is how errors name it.  A default of None makes a text required.
    """

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self._data = data
        self._asked: set[str] = set()
        self.where = where

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def text(self, key: str, default: str | None, form: re.Pattern[str], fits: str) -> str:
        """Return a text that is wholly of FORM."""
        value = self._take(key)
        if value is None:
            if default is None:
                raise ProfileError(f"{self.where} {key}: missing; expected {fits}")
            return default
        return self._check(key, value, form, fits)

    def texts(self, key: str, form: re.Pattern[str], fits: str) -> tuple[str, ...]:
        """Return a list of texts, each of FORM; none if the key is missing."""
        return tuple(self._check(key, value, form, fits) for value in self._list(key, fits))

    def numbers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return a list of integers from LOW to HIGH; none if the key is missing."""
        values = self._list(key, f"integers from {low} to {high}")
        return tuple(self._integer(key, value, low, high) for value in values)

    def number(self, key: str, default: int, low: int, high: int) -> int:
        """Return an integer from LOW to HIGH."""
        value = self._take(key)
        return default if value is None else self._integer(key, value, low, high)

    def flag(self, key: str, default: bool | None) -> bool | None:
        """Return true or false, DEFAULT if the key is missing."""
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def is_table(self, key: str) -> bool:
        """Tell whether the value of KEY is a table (asks for nothing)."""
        return isinstance(self._data.get(key), dict)

    def table(self, key: str) -> Table:
        """Return a table, an empty one if it is missing."""
        value = self._take(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self._wrong(key, value, "a table")
        return Table(value, self._below(key))

    def tables(self, key: str) -> list[Table]:
        """Return an array of tables; a single ``[key]`` counts as one."""
        value = self._take(key)
        if isinstance(value, dict):
            value = [value]
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self._wrong(key, value, "tables, [[...]]")
        if len(value) > LIST_MAX:
            raise ProfileError(f"{self.where} {key}: more than {LIST_MAX}")
        return [Table(one, f"{self.where} [[{key}]] number {index}") for index, one in enumerate(value, 1)]

    def done(self) -> None:
        """Refuse keys that nobody asked for."""
        for key in self._data:
            if key not in self._asked:
                known = ", ".join(sorted(self._asked))
                raise ProfileError(f"{self.where} has no key {printable(key, 40)}; the keys are {known}")

    def _take(self, key: str) -> Any:
        self._asked.add(key)
        return self._data.get(key)

    def _below(self, key: str) -> str:
        if self.where.endswith(":"):
            return f"{self.where} [{printable(key, 40)}]"
        return f"{self.where[:-1]}.{printable(key, 40)}]"

    def _list(self, key: str, fits: str) -> list[Any]:
        value = self._take(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(key, value, f"a list: {fits}")
        if len(value) > LIST_MAX:
            raise ProfileError(f"{self.where} {key}: more than {LIST_MAX}")
        return value

    def _check(self, key: str, value: Any, form: re.Pattern[str], fits: str) -> str:
        if not isinstance(value, str) or not form.fullmatch(value):
            raise self._wrong(key, value, fits)
        return value

    def _integer(self, key: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, value, f"an integer from {low} to {high}")
        return value

    def _wrong(self, key: str, value: Any, fits: str) -> ProfileError:
        return ProfileError(f"{self.where} {key}: expected {fits}, got {printable(value, 80)}")
