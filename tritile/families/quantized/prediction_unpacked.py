"""The predicted time of a product whose quantized weight is unpacked in memory first, in microseconds."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import QuantizedProblem
from tritile.families.common.prediction import TMA_FITTED, TmaFit, tma_us
from tritile.families.quantized.unpacked import dense


def unpacked_us(config: Config, problem: QuantizedProblem, device: Device, fit: TmaFit = TMA_FITTED) -> float:
    """That of the dense product, and before it one more launch, whose bytes move as those of any copy."""
    bytes_moved = problem.weight_bytes + problem.unpacked_bytes
    copy_us = bytes_moved / (device.memory_gbps * fit.repack_share * 1e3) + fit.repack_us
    return tma_us(dense(config), problem.product, device, fit) + copy_us
