"""What a lowered product is."""

from typing import NamedTuple

from tritile.views import MatmulCall
from tritile.work.values import Section, Step


class Lowered(NamedTuple):
    """What a product becomes: launches before the core, the core, launches after it.

    Steps name buffers by number: those of the call's tensors, in their order, and then those of `scratch`.
    Views of the core have as their tensor what the call's have, or a `Placed` that names a buffer.
    """

    before: tuple[Step, ...]
    core: MatmulCall
    after: tuple[Step, ...] = ()
    scratch: tuple[Section, ...] = ()
