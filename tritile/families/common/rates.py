"""State what a GPU reaches on products: operations a clock, and bytes."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.families.common.products import uses_tensor_cores

# Operations of one SM in one clock, a multiply-add counted as two, dense 16-bit on tensor cores: the makers'
# peak rates divided by SMs and boost clock.
_RATE_16BIT = {
    80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 103: 8192, 120: 1024, 121: 1024,
    "gfx942": 2048, "gfx950": 4096,
}  # fmt: skip
_RATE_ELSEWHERE = 2048
_GEFORCE = 0.5  # share of it that GeForce reaches with sums in fp32; int8 is not slowed
# IEEE fp32 `tl.dot`, by whether columns of b are contiguous: a thread reads those element by element.
# Measured on an H200: 38 and 20 TFLOP/s of 8192^3 over 132 SMs.
_RATE_FMA = {False: 180, True: 88}
_RATE_FP64 = {90: 210}  # tensor cores, measured on an H200: 47 TFLOP/s of 8192^3
_RATE_FP64_ELSEWHERE = 128
# Peak of fp32 without tensor cores, and of fp64 by the fastest way, in the same unit, by `Device.arch`.
_PEAK_FP32 = {
    80: 128, 86: 256, 89: 256, 90: 256, 100: 256, 103: 256, 120: 256, 121: 256, "gfx942": 256, "gfx950": 256,
}  # fmt: skip
_PEAK_FP64 = {80: 128, 90: 256, 100: 128, "gfx942": 256}


def rate(problem: MatmulProblem, device: Device) -> float:
    """Return floating-point operations a clock of one SM, as `tl.dot` reaches them on that type."""
    if problem.dtype == "float64":
        return _RATE_FP64.get(device.nvidia, _RATE_FP64_ELSEWHERE)
    if not uses_tensor_cores(problem):
        return _RATE_FMA[problem.b_layout == "column"]
    half = float(_RATE_16BIT.get(device.arch, _RATE_ELSEWHERE))
    if "GeForce" in device.name and problem.dtype != "int8":
        half *= _GEFORCE
    if problem.dtype == "float32":
        return half / {"tf32": 2, "fp16x3": 3}[problem.precision]
    return half * 2 / problem.itemsize


def peak_tflops(problem: MatmulProblem, device: Device) -> float | None:
    """Return the hardware's peak for this product's kind, in TFLOP/s; None if it is unknown.

    It is the maker's dense rate of an SM and clock, times SMs and the device's clock. No kernel reaches it:
    tensor cores do not hold that clock for long. A product made through another counts as that one: a
    multiplication of fp16x3 is three on tensor cores.
    """
    peak: float | None
    problem = problem.core
    if problem.dtype == "float64":
        peak = _PEAK_FP64.get(device.arch)
    elif not uses_tensor_cores(problem):
        peak = _PEAK_FP32.get(device.arch)
    else:
        peak = rate(problem, device) if device.arch in _RATE_16BIT else None
    return None if peak is None else peak * device.processors * device.clock_ghz / 1e3


def multiply_clocks(config: Config, problem: MatmulProblem, device: Device) -> float:
    """Return clocks of an SM to multiply a block of K, at the rate of `rate`."""
    columns = config["BLOCK_N"] * problem.rights
    return 2.0 * config["BLOCK_M"] * columns * config["BLOCK_K"] / rate(problem, device)


def slowdown(problem: MatmulProblem, device: Device, copied: tuple[bool, bool] | None) -> float:
    """Return how much slower tensor cores of Hopper are if tiles of TF32 pass through registers first.

    By pointers (`copied` is None) all tiles do, to be rounded. By descriptor those do whose K is not
    contiguous, to be transposed, unless `copied` says that a or b is copied first. Measured on an H200,
    against tiles that descriptors round: 2.4 to 3.5 times, 4.5 to 6.1, and by descriptor 1.8.
    """
    if problem.precision != "tf32" or device.nvidia != 90:
        return 1.0
    strided = problem.a_layout == "column", problem.b_layout != "column"
    over = any(own and not copy for own, copy in zip(strided, copied or (False, False), strict=True))
    return (2.7 if copied is None else 1.0) * (1.8 if over else 1.0)
