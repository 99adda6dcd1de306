"""The shipped portfolios and leads are those that the committed sweeps come to."""

import pytest

import portfolios
from tritile.core.device import target_device
from tritile.planning import gpu_tables

SWEEPS = portfolios.Path(portfolios.__file__).parent / "sweeps"
FILES = [*sorted(SWEEPS.glob("*.jsonl.gz")), *sorted(SWEEPS.glob("transposed/*.jsonl.gz"))]
SWEPT = portfolios.read_all(FILES, 0.0)


@pytest.mark.parametrize("name", SWEPT)
def test_a_shipped_portfolio_is_of_a_committed_sweep(name):
    (device, rows), shipped = SWEPT[name], gpu_tables.shipped(target_device("nvidia-h200"))[0]
    assert device.name == "NVIDIA H200"
    portfolio, lead = shipped.portfolios.get(name), shipped.leads.get(name)
    if portfolio:
        assert set(portfolio.configs) <= {config for row in rows for config in row.times}
        assert len(rows) - 70 < portfolio.loss.sizes <= len(rows)  # but those at which few were timed
    if lead:
        assert len(rows) - 70 < lead.sizes <= sum(row.torch_us is not None for row in rows)


def test_times_of_a_second_file_replace_those_of_the_first():
    first, second = (
        {row.problem: row.times for row in portfolios.read(SWEEPS / where / "halves-nt.jsonl.gz", 0.0)[1]}
        for where in ("", "transposed")
    )
    rows = {row.problem: row.times for row in SWEPT["halves-nt"][1]}
    assert rows == {problem: first.get(problem, {}) | second.get(problem, {}) for problem in first | second}


def test_what_ships_has_its_sweep():
    shipped = gpu_tables.shipped(target_device("nvidia-h200"))[0]
    assert {*shipped.portfolios, *shipped.leads} <= {*SWEPT}
    assert all(len(SWEPT[name][1]) >= portfolios.ENOUGH for name in shipped.portfolios)
    assert all(portfolios.read(path, 6.0)[1] for path in FILES)
