"""Provenance of results: the commits, machines and versions that made them, and how many results each made."""

from collections.abc import Iterable, Mapping
from typing import Any

from onefold.errors import visible

MAX_VALUE = 200  # characters of a value from a file
ORIGIN_TITLES = {
    "commit": "Commit", "device": "Machine", "cores": "Cores", "onefold": "onefold", "torch": "torch",
    "python": "Python", "date": "Day",
}  # fmt: skip


def parse_origin(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the provenance in a file's content as text, with "unknown" for what is missing or of another type."""
    values = {key: content.get(key) for key in ORIGIN_TITLES}
    return {
        key: str(value)[:MAX_VALUE] if isinstance(value, str) or type(value) is int else "unknown"
        for key, value in values.items()
    }


def count_origins(origins: Iterable[Mapping[str, str]]) -> dict[str, dict[str, int]]:
    """Return, by key, how many results have each value; dates are counted by day."""
    counts: dict[str, dict[str, int]] = {key: {} for key in ORIGIN_TITLES}
    for origin in origins:
        for key, value in origin.items():
            short = value[:10] if key == "date" else value
            counts[key][short] = counts[key].get(short, 0) + 1
    return {key: dict(sorted(values.items())) for key, values in counts.items()}


def describe_origins(counts: Mapping[str, Mapping[str, int]], total: int, noun: str) -> dict[str, list[str]]:
    """Return the values by title, each with its count where it does not hold for all results."""
    return {
        title: [
            visible(value) if count == total else f"{visible(value)} ({count:,} {noun}{'s' * (count != 1)})"
            for value, count in counts[key].items()
        ]
        for key, title in ORIGIN_TITLES.items()
    }
