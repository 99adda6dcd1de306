"""Limits of an SM by generation, and how many programs it holds at once."""

from dataclasses import dataclass
from typing import Any

from tritile.core.device import Device
from tritile.runtime.offline import Resources

# Most warps and blocks of one SM, by compute capability: "Compute Capabilities" in NVIDIA's CUDA C++
# Programming Guide. A compute unit of AMD's CDNA has 4 SIMDs of 8 waves each: "CDNA3 ISA", AMD.
_MOST = {
    70: (64, 32), 72: (64, 32), 75: (32, 16), 80: (64, 32), 86: (48, 16), 87: (48, 16), 89: (48, 24),
    90: (64, 32), 100: (64, 32), 101: (64, 32), 103: (64, 32), 120: (48, 32), 121: (48, 32),
}  # fmt: skip
_OTHERS = (48, 16)  # for capabilities not in the list: the least of recent GPUs, except 7.5
_AMD_WAVES = 32
_REGISTERS = 65536  # of an SM, in four partitions; a warp takes them in units of 256
_RESERVED = 1024  # bytes of shared memory that the system takes for each block
SHARED_BYTES = 128  # that shared memory of an SM moves in a clock: 32 banks of 4 bytes


@dataclass(frozen=True)
class Occupancy:
    """Hold how many programs of a kernel an SM holds at once, and the limit that keeps it from more.

    `warps` counts the warps of these programs, `most` the most that an SM can hold.
    """

    programs: int
    warps: int
    most: int
    limit: str

    @property
    def share(self) -> float:
        """Return warps over the most possible."""
        return self.warps / self.most


def occupancy(taken: Resources, warps: int, device: Device) -> Occupancy:
    """Return the occupancy of a kernel from its resources and its warps per program."""
    if device.backend == "cuda":
        most, blocks = _MOST.get(device.nvidia, _OTHERS)
        of_warp = max(256, -(-taken.registers * device.warp_size // 256) * 256)
        by_registers = _REGISTERS // of_warp // 4 * 4 // warps  # whole warps in each of four partitions
        by_shared = (device.shared_memory + _RESERVED) // (taken.shared + _RESERVED)
    else:
        most, blocks = _AMD_WAVES, _AMD_WAVES
        by_registers = 4 * (512 // max(1, -(-taken.registers // 8) * 8)) // warps
        by_shared = device.shared_memory // max(1, taken.shared)
    limits = {
        "registers": by_registers,
        "shared memory": by_shared,
        "warps": most // warps,
        "programs": blocks,
    }
    least = min(limits.values())
    limit = " and ".join(name for name, count in limits.items() if count == least)
    programs = max(1, least)
    return Occupancy(programs, programs * warps, most, limit)


@dataclass(frozen=True)
class Waves:
    """Hold how many programs there are, and how many run `at_once` on the whole GPU."""

    programs: int
    at_once: int

    @property
    def count(self) -> int:
        """Count the waves, the last one included."""
        return -(-self.programs // self.at_once)

    @property
    def idle(self) -> float:
        """Return the share of the last wave that has nothing to do."""
        return (self.count * self.at_once - self.programs) / self.at_once


def warps_of(kernel: Any) -> int:
    """Count the warps of a compiled kernel's program, specialised warps included."""
    return int(kernel.metadata.num_warps)
