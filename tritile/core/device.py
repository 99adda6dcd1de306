"""One GPU as a frozen value, `Device`. No other module queries the hardware."""

import contextlib
import ctypes
import functools
import re
import subprocess
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
import triton

from tritile.core.triton_private import GPUTarget, assembler
from tritile.errors import DeviceError, InvalidValueError


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that planning and tuning depend on.

    Attributes:
        name: name of the GPU, as torch reports it.
        backend: "cuda" or "hip".
        arch: the compute capability times ten, as in Triton (90), or AMD's name ("gfx942").
        processors: number of SMs, or of compute units.
        l2_bytes: size of the L2 cache.
        shared_memory: bytes of shared memory that one block may opt in to.
        clock_ghz: the vendor's peak clock.
        memory_gbps: the vendor's peak memory bandwidth, in GB/s.
        triton: version of Triton, which changes how fast a config is.
        compiler: version of Triton's assembler, likewise.
    """

    name: str
    backend: str
    arch: int | str
    processors: int
    l2_bytes: int
    shared_memory: int
    clock_ghz: float
    memory_gbps: float
    triton: str = triton.__version__
    compiler: str = ""

    def __repr__(self) -> str:
        arch, units = (f"sm_{self.arch}", "SMs") if self.nvidia else (self.arch, "compute units")
        return f"Device({self.name!r}, {arch}, {self.processors} {units})"

    @functools.cached_property
    def slug(self) -> str:
        """The name of this GPU in file names, such as nvidia-h200."""
        return "".join(c if c.isalnum() else "-" for c in self.name.lower()).strip("-") or "gpu"

    @property
    def nvidia(self) -> int:
        """The compute capability times ten; 0 for a GPU that is not NVIDIA's."""
        return self.arch if self.backend == "cuda" and isinstance(self.arch, int) else 0

    @property
    def has_tma(self) -> bool:
        """True for Hopper and later if tensor cores read shared memory: not for consumer Blackwell, 12.x."""
        return 90 <= self.nvidia < 120

    @property
    def warp_size(self) -> int:
        """The number of threads in a warp."""
        return 64 if str(self.arch).startswith("gfx9") else 32

    @property
    def target(self) -> GPUTarget:
        """This GPU as a target of Triton's compiler."""
        return GPUTarget(self.backend, self.arch, self.warp_size)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Device":
        """Return the GPU that `to_dict` described, on any machine, with this machine's versions.

        Raises InvalidValueError for anything else.
        """
        facts = {k: v for k, v in dict(data).items() if k not in ("triton", "compiler")}
        kinds = {"name": str, "backend": str, "arch": int | str, "clock_ghz": int | float}
        kinds |= {"memory_gbps": int | float, "processors": int, "l2_bytes": int, "shared_memory": int}
        if facts.keys() != kinds.keys() or not all(isinstance(v, kinds[k]) for k, v in facts.items()):
            raise InvalidValueError(f"{str(data)[:200]!r} is not of a GPU: expected {', '.join(kinds)}")
        return cls(**facts, compiler=compiler_version(facts["backend"], facts["arch"]))


def _target(name: str, arch: int | str, sms: int, l2: int, shared: int, clock: float, gbps: float) -> Device:
    backend = "cuda" if isinstance(arch, int) else "hip"
    return Device(name, backend, arch, sms, l2 << 20, shared, clock, gbps)


# Peak figures are from the makers' datasheets, unless noted below. Shared memory is the most that a thread
# block may have: "Compute Capabilities" in NVIDIA's CUDA programming guide (227 KiB on 9.0, 10.0 and 10.3,
# 99 KiB on 8.6, 8.9, 12.0 and 12.1), and the LDS in "AMD GPU specifications" of ROCm's documentation. AMD's
# L3 cache, from there too, counts as L2 here.
# - RTX 5090, RTX PRO 6000: NVIDIA's whitepapers on RTX Blackwell.
# - GB10: the clock follows from 31 TFLOP/s of fp32, which NVIDIA gave at Hot Chips 2025, as the L2 cache.
#   The bandwidth is the DGX Spark's.
# - B300: NVIDIA publishes no SMs, clock or L2 cache; these are the B200's, which has the same rate of fp32.
# - H20: no datasheet is public. SMs are those that benchmarks report; clock and L2 cache are the H200's.
# - GH200: the one with HBM3, named "480GB" for the memory of its CPU. The L2 cache is the H200's.
# What people call a GPU, its key in `TARGETS`, and the arguments of `_target`.
_GPUS: Final[tuple[tuple[Any, ...], ...]] = (
    ("h200", "nvidia-h200", "NVIDIA H200", 90, 132, 60, 232448, 1.98, 4800),
    ("h100", "sm_90", "NVIDIA H100 80GB HBM3", 90, 132, 50, 232448, 1.98, 3350),
    ("a100", "sm_80", "NVIDIA A100-SXM4-80GB", 80, 108, 40, 166912, 1.41, 2039),
    ("b200", "sm_100", "NVIDIA B200", 100, 148, 126, 232448, 1.96, 8000),
    ("l40s", "nvidia-l40s", "NVIDIA L40S", 89, 142, 96, 101376, 2.52, 864),
    ("4090", "nvidia-geforce-rtx-4090", "NVIDIA GeForce RTX 4090", 89, 128, 72, 101376, 2.52, 1008),
    ("mi300x", "gfx942", "AMD Instinct MI300X", "gfx942", 304, 256, 65536, 2.1, 5300),
    ("5090", "sm_120", "NVIDIA GeForce RTX 5090", 120, 170, 96, 101376, 2.41, 1792),
    (
        "pro-6000", "nvidia-rtx-pro-6000-blackwell-workstation-edition",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 188, 128, 101376, 2.6, 1792,
    ),
    ("gb10", "sm_121", "NVIDIA GB10", 121, 48, 24, 101376, 2.52, 273),
    ("b300", "sm_103", "NVIDIA B300 SXM6 AC", 103, 148, 126, 232448, 1.96, 8000),
    ("h20", "nvidia-h20", "NVIDIA H20", 90, 78, 60, 232448, 1.98, 4000),
    ("h800", "nvidia-h800", "NVIDIA H800", 90, 132, 50, 232448, 1.98, 3350),
    ("h200-nvl", "nvidia-h200-nvl", "NVIDIA H200 NVL", 90, 132, 60, 232448, 1.785, 4800),
    ("gh200", "nvidia-gh200-480gb", "NVIDIA GH200 480GB", 90, 132, 60, 232448, 1.98, 4000),
    ("l4", "nvidia-l4", "NVIDIA L4", 89, 58, 48, 101376, 2.04, 300),
    ("a10", "sm_86", "NVIDIA A10", 86, 72, 6, 101376, 1.695, 600),
    ("mi325x", "amd-instinct-mi325x", "AMD Instinct MI325X", "gfx942", 304, 256, 65536, 2.1, 6000),
    ("mi350", "gfx950", "AMD Instinct MI350X", "gfx950", 256, 256, 163840, 2.2, 8000),
)  # fmt: skip
TARGETS: Final[dict[str, Device]] = {key: _target(*facts) for _, key, *facts in _GPUS}
SHORT: Final[dict[str, str]] = {short: key for short, key, *_ in _GPUS}
_BRANDS: Final = re.compile(r"^((nvidia|geforce|rtx|amd|instinct)[-_ ]*)+")

# Where tensors are in host memory, and nothing is predicted or timed.
HOST: Final = Device("host", "cpu", "host", 1, 1 << 20, 1 << 20, 1.0, 1.0)


@functools.cache
def compiler_version(backend: str, arch: int | str) -> str:
    """Return the version of the assembler that Triton calls for this target, "" if it does not say."""
    if backend != "cuda" or not isinstance(arch, int):
        return ""
    try:
        command = [assembler(arch).path, "--version"]
        text = subprocess.run(command, capture_output=True, timeout=30, check=True).stdout
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError, ImportError):
        return ""
    release = [line for line in text.decode(errors="replace").splitlines() if "release" in line]
    return release[0].rsplit(",", 1)[-1].strip() if release else ""


def target_key(name: str) -> str | None:
    """Return the key of `TARGETS` for a name in any case; None for an unknown name.

    Names are those of `SHORT`, with the maker's in front or without, those of `TARGETS`, and torch's with
    hyphens or spaces: nvidia-h100, rtx 4090, rtx pro 6000, sm_90, nvidia-h100-80gb-hbm3.
    """
    lowered = name.strip().lower()
    hyphened = lowered.replace(" ", "-")
    slugs = {device.slug: key for key, device in TARGETS.items()}
    key = SHORT.get(_BRANDS.sub("", hyphened), slugs.get(hyphened, lowered))
    return key if key in TARGETS else None


def target_device(name: str) -> Device:
    """Return a GPU by name, such as "h100" or "sm_90", which need not be in this machine.

    Raises:
        InvalidValueError: the name is unknown; the message lists all names.

    Examples:
        >>> tritile.target_device("h200").processors
        132
    """
    key = target_key(name)
    if key is None:
        names = ", ".join(f"{short} ({key})" for short, key in SHORT.items())
        raise InvalidValueError(f"unknown GPU {name!r}: expected one of {names}")
    device = TARGETS[key]
    return replace(device, compiler=compiler_version(device.backend, device.arch))


@functools.cache
def gpu(index: int) -> Device:
    """Return the properties of CUDA or ROCm device `index`. Raises DeviceError if there is no such GPU."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise DeviceError(f"there is no GPU {index} here: {torch.cuda.device_count()} seen")
    facts = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    arch: int | str = facts.gcnArchName.split(":")[0] if hip else facts.major * 10 + facts.minor
    memory_mhz = getattr(facts, "memory_clock_rate", 0) / 1e3
    bus_bytes = getattr(facts, "memory_bus_width", 0) / 8
    return Device(
        name=facts.name,
        backend="hip" if hip else "cuda",
        arch=arch,
        processors=facts.multi_processor_count,
        l2_bytes=facts.L2_cache_size,
        shared_memory=getattr(facts, "shared_memory_per_block_optin", 0) or 65536,
        clock_ghz=(getattr(facts, "clock_rate", 0) or 1.5e6) / 1e6,
        memory_gbps=2e-3 * memory_mhz * bus_bytes or 1000.0,
        compiler=compiler_version("hip" if hip else "cuda", arch),
    )


def current_gpu() -> Device | None:
    """Return the properties of the current GPU; None on a machine without one."""
    return gpu(torch.cuda.current_device()) if torch.cuda.is_available() else None


def current_index() -> int | None:
    """Return the index of the current GPU; None on a machine without one."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def use(index: int) -> None:
    """Make a GPU the current one of this process. Raises DeviceError if there is no such GPU."""
    if torch.cuda.is_available():
        gpu(index)
        torch.cuda.set_device(index)


def ignore_captures_of_others() -> None:
    """Let this thread copy, wait and load modules while another thread captures a CUDA graph.

    Otherwise CUDA refuses that in every thread, and the capture fails, in torch's default capture mode.
    Source: `cuThreadExchangeStreamCaptureMode` of the CUDA driver API.
    """
    mode = ctypes.c_int(1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    name = "libamdhip64.so" if torch.version.hip else "libcuda.so.1"
    call = f"{'hip' if torch.version.hip else 'cu'}ThreadExchangeStreamCaptureMode"
    with contextlib.suppress(OSError, AttributeError):  # no such driver
        getattr(ctypes.CDLL(name), call)(ctypes.byref(mode))


def capturing() -> bool:
    """True if a CUDA graph is being captured on the current stream: nothing can be measured then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
