"""Return what any call launches with a config."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.views import Call, MatmulCall
from tritile.errors import TuningError
from tritile.families.common.work import Work
from tritile.families.lowering import joined, lowered
from tritile.families.registry import FAMILIES


def early(device: Device) -> bool:
    """Tell whether kernels on this GPU may start before the one ahead of them is done."""
    return 90 <= device.nvidia < 120


def work_of(call: Call, config: Config, processors: int, early: bool) -> Work:
    """Tell what launches `call` with `config` on a GPU of so many processors.

    `early`: kernels may start before the one ahead of them in the stream is done, and wait in themselves
    for what they read (programmatic dependent launch). Raises TuningError where the family cannot.
    """
    if isinstance(call, MatmulCall) and (parts := lowered(call, early)) is not None:
        return joined(parts, work_of(parts.core, config, processors, early))
    family = FAMILIES[call.op].get(config.family)
    if family is None:
        raise TuningError(f"{config} is of no family of {call.op}: {', '.join(FAMILIES[call.op])}")
    return family.work(call, config, processors, early)
