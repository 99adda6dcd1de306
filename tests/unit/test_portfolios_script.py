"""The shipped portfolios are those that the committed sweeps come to."""

import pytest

import portfolios
from tritile.core.device import target_device
from tritile.core.problem import suits
from tritile.nn.exchanged import PARTS_AHEAD
from tritile.planning import gpu_tables

SWEEPS = portfolios.Path(portfolios.__file__).parent / "sweeps"
FILES = [*sorted(SWEEPS.glob("*.jsonl.gz")), *sorted(SWEEPS.glob("more/*.jsonl.gz"))]


@pytest.fixture(scope="module")
def files():
    """What each file holds: to read all takes seconds."""
    return {path: portfolios.read(path, 0.0) for path in FILES}


@pytest.fixture(scope="module")
def swept(files):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portfolios, "read", lambda path, least: files[path])
        return portfolios.read_all(FILES, 0.0)


def test_a_shipped_portfolio_is_of_a_committed_sweep(swept):
    shipped = gpu_tables.shipped(target_device("nvidia-h200"))[0]
    for name, (device, rows) in swept.items():
        assert device.name == "NVIDIA H200"
        portfolio = shipped.portfolios.get(name)
        if portfolio:
            assert set(portfolio.configs) <= {config for row in rows for config in row.times}
            assert len(rows) - 70 < portfolio.loss.sizes <= len(rows)  # but those at which few were timed


def test_times_of_a_second_file_replace_those_of_the_first(files, swept):
    first, second = (
        {row.problem: row.times for row in files[SWEEPS / where / "halves-nt.jsonl.gz"][1]}
        for where in ("", "more")
    )
    rows = {row.problem: row.times for row in swept["halves-nt"][1]}
    assert rows == {problem: first.get(problem, {}) | second.get(problem, {}) for problem in first | second}


def test_what_ships_has_its_sweep(files, swept):
    shipped = gpu_tables.shipped(target_device("nvidia-h200"))[0]
    assert {*shipped.portfolios} <= {*swept}
    assert all(len(swept[name][1]) >= portfolios.ENOUGH for name in shipped.portfolios)


def test_torch_took_twice_as_long_where_fp16_parts_are_the_default(swept):
    rows = [row for row in swept["parts"][1] if suits(row.problem.m, row.problem.n, row.problem.k)]
    assert len(rows) >= 5
    assert all(row.torch_us > PARTS_AHEAD * min(row.times.values()) for row in rows)


def test_sizes_that_take_less_than_asked_are_left_out(files):
    long = {path: [row for row in rows if min(row.times.values()) >= 6] for path, (_, rows) in files.items()}
    assert all(long.values())
    path = next(path for path in FILES if long[path] != files[path][1])
    assert portfolios.read(path, 6.0)[1] == long[path]
