"""Calls that are refused: tables of them as cases of a test, and what each must do."""

import pytest

from tritile import errors
from tritile.families import launching
from tritile.ops import reference


def cases(tables):
    """A parameter (kind of error, call, words of its message) for every (label, call, words) of each kind."""
    return [
        pytest.param(kind, call, words, id=f"{kind.__name__}-{label}")
        for kind, rows in tables.items()
        for label, call, words in rows
    ]


def recorded(monkeypatch):
    """A list to which every launch, and all that torch would compute, comes from now on; none happens."""
    seen = []
    for name in ("run_interpreted", "prepare"):
        monkeypatch.setattr(launching, name, lambda call, *rest: seen.append(call))
    for name in ("product", "grouped", "linear_quantized", "permute"):
        monkeypatch.setattr(reference, name, lambda *given, **fused: seen.append(given))
    return seen


def assert_refused(kind, call, words, launches):
    """The call raises just this error, which says all of these words, and launches nothing."""
    with pytest.raises(errors.TritileError) as caught:
        call()
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    assert launches == []
