"""Weights in whole rows are read by words of 16 bytes, in every Triton."""

import re

from tests.ahead import H200, compiled, instructions
from tritile.core.config import Config
from tritile.core.problem import MatmulProblem


def test_few_rows_read_weights_in_words(tmp_path):
    problem = MatmulProblem(1, 4, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
    config = Config.of(4, 4, "skinny_k", BLOCK_M=4, BLOCK_N=16, BLOCK_K=256)
    assert not re.search(r"LDG\.E\.U16", instructions(compiled(problem, config, H200), tmp_path))
