"""Layers and operators spread over two ranks give one device's answers, bit for bit, forward and backward."""

import pytest

from tests.unit import helpers_for_parallel as helpers


@pytest.mark.slow
def test_two_ranks_do_as_one_device(server, tmp_path):
    helpers.run_ranks(server, tmp_path, "cpu", helpers.WORKS)
