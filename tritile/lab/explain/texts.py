"""An explanation as rows of text."""

import math
from typing import TYPE_CHECKING

from tritile.core.problem import MatmulProblem

if TYPE_CHECKING:
    from tritile.lab.explain.explanation import Explanation

Line = tuple[str, str, str]  # a name, a figure and its meaning
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def bytes_text(count: float) -> str:
    """Write a number of bytes in decimal units, as memory rates are given: 134 MB."""
    for unit in _UNITS[:-1]:
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}"


def kib_text(count: float) -> str:
    """Write a number of bytes that a chip or a file holds, in KiB: 227 KiB."""
    return f"{count / 1024:,.0f} KiB" if count >= 10240 or not count % 1024 else f"{count / 1024:.1f} KiB"


def rows(of: "Explanation") -> list[Line]:
    """Return rows of a name, a figure and its meaning."""
    return [*_traffic(of), *_roofline(of), *_tiles(of), *_kernel(of), *_time(of)]


def _traffic(of: "Explanation") -> list[Line]:
    how = "in sectors, element by element along x"
    if isinstance(of.problem, MatmulProblem):
        how = "every element of out reads a row and a column"
    return [
        ("bytes, untiled", bytes_text(of.untiled.total), how),
        ("bytes, this tiling", bytes_text(of.tiled.total), _cut(of)),
        ("bytes, least", bytes_text(of.least.total), "inputs once, output once"),
    ]


def _cut(of: "Explanation") -> str:
    if of.reuse >= 1.005:
        return f"tiling cut them by a factor of {of.reuse:.3g}"
    return "tiling saves none here" if of.reuse > 0.995 else f"{1 / of.reuse:.3g} times as many"


def _roofline(of: "Explanation") -> list[Line]:
    if not isinstance(of.problem, MatmulProblem):
        gbps = of.device.memory_gbps
        return [("roof", f"{of.roof_us:.1f} us", f"device memory at its peak of {gbps:.0f} GB/s")]
    shared = ", unless the batch shares an operand" if of.problem.batch > 1 else ""
    if of.ridge is None or of.peak_tflops is None:
        told = "the peak rate of this GPU is not known: memory is the only roof"
    else:
        side = "memory is the roof" if of.intensity < of.ridge else "multiplying is the roof"
        told = f"{side}: the ridge of this GPU is at {of.ridge:.0f} ({of.peak_tflops:.0f} TFLOP/s)"
    return [
        ("intensity", f"{of.intensity:.1f} op/byte", told),
        ("roof", f"{of.roof_us:.1f} us", "no kernel is faster on this GPU" + shared),
    ]


def _tiles(of: "Explanation") -> list[Line]:
    work, waves = of.work, of.waves
    idle = math.floor(100 * waves.idle)  # 100% means all
    lost = "lies beyond the edge" if isinstance(of.problem, MatmulProblem) else "is moved twice"
    parts = f", each shared by {work.units // work.tiles} programs" if work.units > work.tiles else ""
    return [
        ("tiles", f"{work.tiles}{parts}", f"{1 - work.filled:.1%} of what they cover {lost}"),
        ("waves", str(waves.count), f"of {waves.at_once} tiles at once; {idle}% of the last one is idle"),
    ]


def _kernel(of: "Explanation") -> list[Line]:
    if of.taken is None or of.occupancy is None:
        return [("kernel", "none", of.refusal)]
    taken, held = of.taken, of.occupancy
    shared = f"of {kib_text(of.device.shared_memory)} that a program may have"
    programs = "1 program" if held.programs == 1 else f"{held.programs} programs"
    spilled = "none" if not taken.spills else "registers that spill to memory cost time"
    limit = f"{programs}, {held.warps} of {held.most} warps; limited by {held.limit}"
    return [
        ("registers", f"{taken.registers} a thread", ""),
        ("spills", f"{taken.spills} bytes", spilled),
        ("shared memory", kib_text(taken.shared), shared),
        ("occupancy", f"{held.share:.0%}", limit),
    ]


def _time(of: "Explanation") -> list[Line]:
    parts = ", ".join(f"{name} {us:.1f}" for name, us in of.parts.items())
    measured = "not measured here" if of.measured_us is None else f"{of.measured_us:.1f} us"
    note = ""
    if of.measured_us is not None:
        when = "now" if of.live else "when it was tuned"
        note = f"{when}: {of.measured_us / of.predicted_us:.2f} of the prediction; "
        note += f"{of.roof_us / of.measured_us:.0%} of the roof's rate"
    return [
        ("bound by", of.bound, f"microseconds of each part by itself: {parts}"),
        ("time, predicted", f"{of.predicted_us:.1f} us", ""),
        ("time, measured", measured, note),
    ]
