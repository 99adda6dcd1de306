"""The shipped portfolios are those that the committed sweeps come to."""

import pytest

import portfolios
from tritile.core.device import target_device
from tritile.planning import table

FILES = sorted((portfolios.Path(portfolios.__file__).parent / "sweeps").glob("*.jsonl.gz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_portfolio_is_of_a_committed_sweep(path):
    device, rows = portfolios.read(path, 0.0)
    shipped = table.shipped(target_device("nvidia-h200")).portfolios[path.name.partition(".")[0]]
    assert device.name == "NVIDIA H200"
    assert set(shipped.configs) <= {config for row in rows for config in row.times}
    assert shipped.loss.sizes <= len(rows)
    assert len(rows) - shipped.loss.sizes < 20  # of sizes at which few were timed
    assert portfolios.read(path, 6.0)[1]


def test_every_shipped_portfolio_has_its_sweep():
    shipped = table.shipped(target_device("nvidia-h200")).portfolios
    assert set(shipped) == {path.name.partition(".")[0] for path in FILES}
