"""The shipped portfolios and leads are those that the committed sweeps come to."""

import pytest

import portfolios
from tritile.core.device import target_device
from tritile.planning import gpu_tables

FILES = sorted((portfolios.Path(portfolios.__file__).parent / "sweeps").glob("*.jsonl.gz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_portfolio_is_of_a_committed_sweep(path):
    device, rows = portfolios.read(path, 0.0)
    name, shipped = path.name.partition(".")[0], gpu_tables.shipped(target_device("nvidia-h200"))[0]
    assert device.name == "NVIDIA H200"
    portfolio, lead = shipped.portfolios.get(name), shipped.leads.get(name)
    if portfolio:
        assert set(portfolio.configs) <= {config for row in rows for config in row.times}
        assert len(rows) - 70 < portfolio.loss.sizes <= len(rows)  # but those at which few were timed
    if lead:
        assert len(rows) - 70 < lead.sizes <= sum(row.torch_us is not None for row in rows)
    assert portfolios.read(path, 6.0)[1]


def test_what_ships_has_its_sweep():
    shipped = gpu_tables.shipped(target_device("nvidia-h200"))[0]
    assert {*shipped.portfolios, *shipped.leads} <= {path.name.partition(".")[0] for path in FILES}
    assert all(
        len(portfolios.read(path, 0.0)[1]) >= portfolios.ENOUGH
        for path in FILES
        if path.name.partition(".")[0] in shipped.portfolios
    )
