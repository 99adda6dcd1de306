"""What a multiprocessor holds and does in a clock, by generation, and how many programs it has room for."""

from dataclasses import dataclass
from typing import Any

from tritile.device import Device
from tritile.offline import Resources

# Warps and blocks of one multiprocessor, by compute capability: "Compute Capabilities" in NVIDIA's CUDA C++
# Programming Guide. A compute unit of AMD's CDNA has 4 SIMDs of 8 waves each: "CDNA3 ISA", AMD.
_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
_BLOCKS = {80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 120: 24}
_AMD_WAVES = 32
_REGISTERS = 65536  # of a multiprocessor; warps take them in units of 256
_RESERVED = 1024  # bytes of shared memory that the system takes of each block
SHARED_BYTES = 128  # of shared memory in a clock of one multiprocessor: 32 banks of 4 bytes


@dataclass(frozen=True)
class Occupancy:
    """How many programs of a kernel one multiprocessor holds at once, and what keeps it from holding more.

    `warps` are theirs together, of the `most` that it can have.
    """

    programs: int
    warps: int
    most: int
    limit: str

    @property
    def share(self) -> float:
        """Warps by the most there can be."""
        return self.warps / self.most


def occupancy(taken: Resources, warps: int, device: Device) -> Occupancy:
    """The occupancy of a kernel that takes so much, with so many warps a program."""
    if device.backend == "cuda":
        most, blocks = _WARPS.get(device.nvidia, 48), _BLOCKS.get(device.nvidia, 16)
        of_warp = -(-taken.registers * device.warp_size // 256) * 256
        by_registers = _REGISTERS // max(1, of_warp * warps)
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
    programs = max(1, min(limits.values()))
    return Occupancy(programs, programs * warps, most, min(limits, key=lambda name: limits[name]))


@dataclass(frozen=True)
class Waves:
    """Programs by how many rounds of the whole GPU they take.

    `at_once` run together; `idle` is the share of the last wave's places that stay empty.
    """

    programs: int
    at_once: int

    @property
    def count(self) -> int:
        """Waves, the last one included."""
        return -(-self.programs // self.at_once)

    @property
    def idle(self) -> float:
        """The share of the last wave that has nothing to do."""
        return (self.count * self.at_once - self.programs) / self.at_once


def warps_of(kernel: Any) -> int:
    """Warps of a program of a compiled kernel, those of specialised warps too."""
    return int(kernel.metadata.num_warps)
