"""Return what any call launches with a config."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.views import Call, MatmulCall
from tritile.errors import TuningError
from tritile.families.common.work import Work
from tritile.families.lowering import joined, lowered
from tritile.families.registry import FAMILIES


def early(device: Device) -> bool:
    """Tell whether kernels on this GPU use programmatic dependent launch."""
    return 90 <= device.nvidia < 120


def work_of(call: Call, config: Config, processors: int, early: bool) -> Work:
    """Return the launches of `call` with `config`, on a GPU of so many SMs.

    `early`: kernels use programmatic dependent launch: they start before the kernel ahead in the stream is
    done, and wait themselves for their inputs. Raises TuningError where the family cannot make the call.
    """
    if isinstance(call, MatmulCall) and (parts := lowered(call, early)) is not None:
        return joined(parts, work_of(parts.core, config, processors, early))
    family = FAMILIES[call.op].get(config.family)
    if family is None:
        raise TuningError(f"{config} is of no family of {call.op}: {', '.join(FAMILIES[call.op])}")
    return family.work(call, config, processors, early)
