"""The configs of products with quantized weights that are unpacked in memory first: those of warpgroups.

One launch writes the weight as 16-bit floats, which the dense kernel reads: 2 N K bytes there and back,
whatever M is. The fused kernels move none of these, but unpack the weight again for each row of tiles, and
their tensor cores wait meanwhile.
"""

from dataclasses import replace
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, QuantizedProblem
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.quantized import family as quantized

NAME: Final = "unpacked"
CONFIGS: Final[dict[str, tuple[Config, ...]]] = {
    QuantizedProblem.op: tuple(
        replace(config, family=NAME) for config in warpgroups.CONFIGS[MatmulProblem.op]
    )
}
_TALLEST: Final = max(config["BLOCK_M"] for config in quantized.CONFIGS[QuantizedProblem.op])


def dense(config: Config) -> Config:
    """The config of the dense kernel that multiplies by the unpacked weight."""
    return replace(config, family=warpgroups.NAME)


def illegal(config: Config, problem: QuantizedProblem, device: Device) -> str | None:
    """Why `config` may not run `problem` on `device`, or None where it may."""
    return warpgroups.illegal(dense(config), problem.product, device)


def pointless(config: Config, problem: QuantizedProblem, device: Device) -> bool:
    """Whether another config of the family does the same or strictly less work."""
    return warpgroups.pointless(dense(config), problem.product, device)


def contends(problem: QuantizedProblem) -> bool:
    """Whether the family can be the fastest: not where one fused tile has all rows.

    That one unpacks each number once as well. At 256 rows the copy still takes about as long as the product:
    2.5 bytes at 3.8 TB/s beside 512 operations at 700 TFLOP/s, for each number of 4 bits on an H200.
    """
    return problem.m > _TALLEST
