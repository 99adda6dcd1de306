"""Studies of the tuner as plain rows, from `tritile tune --study` and compare_autotune.py."""

from collections.abc import Iterable, Mapping
from typing import Any

from tritile.core.problem import Problem
from tritile.errors import InvalidValueError
from tritile.lab.report.page.rows import Row
from tritile.planning.trial import MAX_US, number_from


def _number(row: Mapping[str, Any], name: str) -> Any:
    """Return a number of a row, or None. Raises InvalidValueError for anything else."""
    try:
        return number_from(row.get(name), 0, MAX_US)
    except InvalidValueError as error:
        raise InvalidValueError(f"{name}: {error}") from error


def _text(row: Mapping[str, Any], name: str) -> str:
    if not isinstance(row.get(name), str):
        raise InvalidValueError(f"{name} = {str(row.get(name))[:80]!r}: wanted text")
    return str(row[name])


def _is_of(row: Mapping[str, Any], gpu: str) -> bool:
    env = row.get("env")
    return isinstance(env, dict) and env.get("gpu") == gpu


def _study_row(row: Any, by_label: Mapping[str, Row]) -> Row:
    if not isinstance(row, dict) or not isinstance(row.get("regrets"), list):
        raise InvalidValueError("a problem of a study: wanted its regrets as a list")
    regrets = [number_from(value, 0, MAX_US) for value in row["regrets"]]
    names = ("first_pick_regret", "transfer_regret", "tune_seconds", "configs", "space", "best_us")
    label = _text(row, "problem")
    facets = by_label.get(label, {"op": [], "suite": [], "dtype": [], "layout": []})
    return {
        "problem": label,
        **facets,
        "best": _text(row, "best"),
        "regrets": [value for value in regrets if value is not None],
        **{name: _number(row, name) for name in names},
    }


def study_rows(studies: Iterable[dict[str, Any]], gpu: str, facets: Mapping[Problem, Row]) -> list[Row]:
    """Return a row for each problem of this GPU's studies: regrets as fractions, seconds, microseconds.

    Raises InvalidValueError for a study that `tritile tune --study` cannot have written.
    """
    by_label = {problem.label: row for problem, row in facets.items()}
    own = [study for study in studies if _is_of(study, gpu)]
    rows = [_study_row(row, by_label) for study in own for row in study["problems"]]
    return [row | {"t": number} for number, row in enumerate(rows)]


def autotune_rows(lists: Iterable[list[dict[str, Any]]], gpu: str) -> list[Row]:
    """Return first calls of decorated kernels beside `triton.autotune`: seconds, and the winners' times."""
    names = ("triton_s", "tritile_s", "space_s", "triton_us", "tritile_us", "space_us")
    return [
        {"kernel": _text(row, "kernel"), "problem": _text(row, "problem")}
        | {name: _number(row, name) for name in names}
        for rows in lists
        for row in rows
        if row.get("measures") == "tuning" and _is_of(row, gpu)
    ]
