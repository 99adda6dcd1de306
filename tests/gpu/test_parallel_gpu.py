"""Layers and operators spread over two GPUs give one GPU's answers, bit for bit, forward and backward."""

import pytest
import torch

from tests.unit import helpers_for_parallel as helpers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < helpers.RANKS, reason="needs two GPUs"),
]


def test_two_gpus_do_as_one(server, tmp_path):
    helpers.run_ranks(server, tmp_path, "cuda", [*helpers.WORKS, "compiled"])
