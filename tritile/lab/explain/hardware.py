"""What a multiprocessor holds and does in a clock, by generation, and how many programs it has room for."""

from dataclasses import dataclass
from typing import Any

from tritile.core.device import Device
from tritile.runtime.offline import Resources

# Warps and blocks of one multiprocessor, by compute capability: "Compute Capabilities" in NVIDIA's CUDA C++
# Programming Guide. A compute unit of AMD's CDNA has 4 SIMDs of 8 waves each: "CDNA3 ISA", AMD.
_MOST = {
    70: (64, 32), 72: (64, 32), 75: (32, 16), 80: (64, 32), 86: (48, 16), 87: (48, 16), 89: (48, 24),
    90: (64, 32), 100: (64, 32), 101: (64, 32), 103: (64, 32), 120: (48, 32), 121: (48, 32),
}  # fmt: skip
_OTHERS = (48, 16)  # of a capability that is not in the list: no GPU of the last years has less, but for 7.5
_AMD_WAVES = 32
_REGISTERS = (
    65536  # of a multiprocessor; a warp takes them in units of 256, and four warps at a time have room
)
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
        most, blocks = _MOST.get(device.nvidia, _OTHERS)
        of_warp = max(256, -(-taken.registers * device.warp_size // 256) * 256)
        by_registers = _REGISTERS // of_warp // 4 * 4 // warps  # a quarter of them in each of four partitions
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
