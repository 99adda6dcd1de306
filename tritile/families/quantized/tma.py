"""The configs of products with quantized weights to which x comes by tensor descriptor (TMA)."""

from dataclasses import replace
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import QuantizedProblem
from tritile.families.matmul_tma import family as descriptor
from tritile.families.quantized import family as quantized

NAME: Final = descriptor.NAME
CONFIGS: Final[dict[str, tuple[Config, ...]]] = {
    op: tuple(replace(config, family=NAME) for config in own) for op, own in quantized.CONFIGS.items()
}
pointless = quantized.pointless


def illegal(config: Config, problem: QuantizedProblem, device: Device) -> str | None:
    """Why `config` may not run `problem` on `device`, or None where it may."""
    if device.nvidia < 90 or device.nvidia >= 120:
        return f"{device.name} has no tensor memory accelerator"
    if problem.x_layout != "row" or problem.x_align < 16:
        return f"rows of x are {problem.x_layout}, {problem.x_align} bytes aligned: not on 16 bytes"
    return quantized.illegal(config, problem, device)
