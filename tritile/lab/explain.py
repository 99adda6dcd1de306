"""`tritile.explain`: what a call costs with a config, what bounds its time, and how other configs compare.

Bytes and times are computed. The kernel is compiled for the GPU, which need not be installed, but it is not
launched.
"""

import math
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from tritile.choose import aten, gpu_tables, waves
from tritile.choose.classes import class_of
from tritile.choose.pick import Plan, trials
from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.markup import Tabular
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import GroupedProblem, MatmulProblem, Plain, Tiled, problem_to_dict
from tritile.core.settings import mode
from tritile.errors import InvalidValueError, TuningError, UnsupportedError, did_you_mean
from tritile.families.common import skinny
from tritile.families.common.products import uses_tensor_cores
from tritile.families.common.rates import peak_tflops, rate
from tritile.families.launching import compiled_for
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.permute import boxes
from tritile.families.permute import family as permute
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal
from tritile.lab import traffic
from tritile.lab.traffic import Tiling, Traffic, bytes_text
from tritile.ops.plan import IN_PLACE, plan_call
from tritile.runtime.ahead import Resources, check_fits, resources

MEMORY: Final = "device memory"
L2: Final = "L2 cache"
TENSOR_CORES: Final = "tensor cores"
FMA: Final = "multiply-adds"
INSTRUCTIONS: Final = "instructions"
SHARED: Final = "shared memory"
LATENCY: Final = "latency"
_ALTERNATIVES: Final = 4
_UNEXPLAINED: Final = 1.5  # no unit explains a time that is longer than its longest part by this factor
# Most resident warps and blocks of an SM, by compute capability: "Compute Capabilities" in NVIDIA's CUDA C++
# Programming Guide.
_SM_LIMITS: Final = dict.fromkeys((70, 72, 80, 90, 100, 101, 103), (64, 32)) | {
    75: (32, 16), 86: (48, 16), 87: (48, 16), 89: (48, 24), 120: (48, 32), 121: (48, 32),
}  # fmt: skip
_OTHER_LIMITS: Final = (48, 16)  # the least of recent GPUs, except 7.5
_REGISTERS: Final = 65536  # of an SM, in four partitions; allocated to warps in units of 256
_RESERVED: Final = 1024  # bytes of shared memory that the system reserves per block
_L2_BYTES: Final = 64.0  # per SM per clock from the L2 cache, with all SMs reading
_SHARED_BYTES: Final = 128  # per clock of an SM's shared memory: 32 banks of 4 bytes


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def us_text(us: float) -> str:
    """Return microseconds with one decimal, or below 0.1 with two significant digits."""
    digits = 1 - math.floor(math.log10(us)) if 0 < us < 0.1 else 1
    return f"{us:.{digits}f} us"


@dataclass(frozen=True)
class Occupancy:
    """How many programs of a kernel an SM runs at once, their warps, and what limits them."""

    programs: int
    warps: int
    most_warps: int
    limit: str


@dataclass(frozen=True)
class Cost:
    """What a config costs. Predictions are typically off by some 10%, so smaller differences mean nothing.

    Attributes:
        config: the config.
        predicted_us: microseconds, by the predictor for configs that were swept in the problem's class; by
            the model for any other config, and where no predictor covers the problem.
        measured_us: measured microseconds; None if the config was not tuned on this GPU and its table does
            not have it.
        tiled: bytes that the tiles' loads (`read`) and stores (`written`) request from global memory. For a
            permutation these are whole 32-byte sectors. Divide by `problem.itemsize` for elements.
        tiling: the number of `tiles` and `programs`, and which share of the tiles is `filled`.
        parts_us: microseconds that each unit of the GPU needs by itself, the longest first.
        bound: the unit that sets the time, or "latency" if none explains it.
    """

    config: Config
    predicted_us: float
    measured_us: float | None
    tiled: Traffic
    tiling: Tiling
    parts_us: dict[str, float]
    bound: str


@dataclass(frozen=True, repr=False)
class Explanation(Tabular, Cost):
    """A call's plan, and what it costs on one device. It prints as a table. It has all that `Cost` has, too.

    Attributes:
        problem: what is computed.
        source: where the config comes from, as in `tritile.Plan`; "requested" if it was passed.
        device: the GPU.
        untiled: bytes that would be requested element by element, without tiles.
        unique: bytes if each input is read once and the output written once.
        at_once: how many programs the whole GPU runs at once; `waves` follow from it.
        resources: registers, spills and shared memory of the compiled kernel; None if it does not compile.
        occupancy: programs and warps of an SM, which follow from `resources`; None for AMD GPUs.
        failure: why the kernel does not compile; "" if it does.
        alternatives: the best configs with other tiles, each as a `Cost`.
        call: the plan of a call. If it runs torch's kernel, whose cost is unknown, all else is about
            tritile's.
    """

    problem: Plain
    source: str
    device: Device
    untiled: Traffic
    unique: Traffic
    at_once: int
    resources: Resources | None
    occupancy: Occupancy | None
    failure: str
    alternatives: tuple[Cost, ...]
    call: Plan

    @property
    def reuse(self) -> float:
        """The factor by which tiling reduces the requested bytes."""
        return self.untiled.total / self.tiled.total

    @property
    def waves(self) -> int:
        """How many times the GPU fills up with programs, including the last wave, which may be partial."""
        return -(-self.tiling.programs // self.at_once)

    @property
    def idle(self) -> float:
        """The share of the last wave in which no program runs."""
        return self.waves - self.tiling.programs / self.at_once

    @property
    def intensity(self) -> float:
        """Operations per unique byte; 0 for a permutation."""
        return self.problem.flops / self.unique.total if isinstance(self.problem, MatmulProblem) else 0.0

    @property
    def peak_tflops(self) -> float | None:
        """Peak TFLOP/s for the product's dtype; None for a permutation, or if it is unknown."""
        return peak_tflops(self.problem, self.device) if isinstance(self.problem, MatmulProblem) else None

    @property
    def ridge(self) -> float | None:
        """The intensity above which multiplying, not device memory, limits the time; None if unknown."""
        return 1e3 * self.peak_tflops / self.device.memory_gbps if self.peak_tflops else None

    @property
    def roof_us(self) -> float:
        """A lower bound on the time of any kernel on this GPU, in microseconds.

        It follows from memory bandwidth and, if the peak rate of the dtype is in a table, from arithmetic.
        """
        memory = self.unique.total / (self.device.memory_gbps * 1e3)
        if not (isinstance(self.problem, MatmulProblem) and self.peak_tflops):
            return memory
        return max(memory, self.problem.core.flops / (self.peak_tflops * 1e6))

    @property
    def summary(self) -> str:
        """One line: how much of the GPU is busy, how long the call takes, and what limits it."""
        programs, processors = self.tiling.programs, self.device.processors
        if programs < processors:
            share = f"{_counted(programs, 'program')} on {processors} SMs: "
            share += f"{1 - programs / processors:.0%} of the SMs idle"
        else:
            waves = f"{_counted(self.waves, 'wave')} of {self.at_once}"
            share = f"{programs} programs in {waves}: {self.idle:.0%} of the last wave idle"
        us, source = self.measured_us, "measured"
        if us is None:
            us, source = self.predicted_us, "predicted"
        by = "multiplying" if self.ridge is not None and self.intensity >= self.ridge else "device memory"
        return f"{share}; {us_text(us)} {source}; {by} alone needs {us_text(self.roof_us)}"

    @property
    def _by_torch(self) -> str:
        us, measured = self.call.us, self.call.source in ("exact", "pinned", "table")
        time = self.call.why if us is None else f"{us_text(us)} {'measured' if measured else 'predicted'}"
        below = "the requested config" if self.source == "requested" else "the fastest of tritile's"
        return f"runs torch's kernel here: {time}; below is {below}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dictionary for JSON, in bytes and microseconds."""
        configs = [asdict(each) | {"config": each.config.to_dict()} for each in self.alternatives]
        found: dict[str, Any] = asdict(self) | {"config": self.config.to_dict(), "alternatives": configs}
        found |= {"problem": problem_to_dict(self.problem), "device": self.device.name}
        call = self.call
        found["call"] = {"config": call.config.to_dict(), "source": call.source, "us": call.us}
        names = ("summary", "waves", "idle", "intensity", "ridge", "peak_tflops", "roof_us")
        return found | {name: getattr(self, name) for name in names}

    @property
    def _title(self) -> str:
        what = self.problem.label
        if isinstance(self.problem, PermuteProblem):  # its label begins with the sizes of the result
            shape, steps = self.problem.shape, self.problem.x_strides
            sizes = [shape[i] for i in sorted(range(len(shape)), key=lambda i: (-steps[i], i))] or [1]
            what = f"{'x'.join(map(str, sizes))} to {what}"
        return f"{what} on {self.device.name}: {self.config} ({self.source})"

    @property
    def _rows(self) -> list[tuple[str, str]]:
        tiles, roof = self.tiling, f"{us_text(self.roof_us)}: no kernel can be faster on this GPU"
        if self.peak_tflops is not None and self.ridge is not None:
            by = "device memory" if self.intensity < self.ridge else "multiplying"
            roof += f"; limited by {by}, at {self.intensity:.1f} op/byte with the ridge at {self.ridge:.0f}"
            roof += f" ({self.peak_tflops:.0f} TFLOP/s)"
        elif isinstance(self.problem, MatmulProblem):
            roof += "; by device memory only, because the peak rate of this GPU is unknown"
        programs = f" by {tiles.programs} programs" if tiles.programs > tiles.tiles else ""
        measured = "not on this GPU: `tritile tune`, run there, measures it"
        if (us := self.measured_us) is not None:
            measured = f"{us_text(us)}, {us / self.predicted_us:.2f} times the prediction"
        rows = [("a call", self._by_torch)] if self.call.config == aten.CONFIG else []
        rows += [
            ("in short", self.summary),
            ("bytes without tiles", bytes_text(self.untiled.total)),
            ("bytes with these tiles", f"{bytes_text(self.tiled.total)}, {self.reuse:.3g} times fewer"),
            ("unique bytes", f"{bytes_text(self.unique.total)}: inputs read once, output written once"),
            ("roof", roof),
            ("tiles", f"{tiles.tiles}{programs}, {tiles.filled:.1%} filled"),
            ("waves", f"{self.waves} of {self.at_once} programs; {self.idle:.0%} of the last wave is idle"),
        ]
        if (used := self.resources) is None:
            rows.append(("kernel", self.failure))
        else:
            room = self.device.shared_memory / 1024
            rows.append(("registers", f"{used.registers} per thread, {used.spills} bytes spilled"))
            rows.append(("shared memory", f"{used.shared / 1024:.1f} of {room:.0f} KiB"))
        if (fits := self.occupancy) is not None:
            warps = f"{fits.warps} of {fits.most_warps} warps on an SM"
            programs = _counted(fits.programs, "program")
            rows.append(("occupancy", f"{programs}, {warps}; limited by {fits.limit}"))
        parts = ", ".join(f"{name} {us_text(us)}" for name, us in self.parts_us.items())
        rows += [
            ("bound by", f"{self.bound}; each unit alone: {parts}"),
            ("predicted", us_text(self.predicted_us)),
            ("measured", measured),
        ]
        for i, one in enumerate(self.alternatives):
            times = f"measured {us_text(one.measured_us)}, " if one.measured_us is not None else ""
            times += f"predicted {us_text(one.predicted_us)}; {one.bound}"
            cost = f"{bytes_text(one.tiled.total)}, {one.tiling.filled:.1%} filled"
            rows.append(("" if i else "other tiles", f"{one.config}: {times}; {cost}"))
        return rows


def occupancy(used: Resources, warps: int, device: Device) -> Occupancy | None:
    """Return a kernel's occupancy from its resources and its warps per program; None for AMD GPUs."""
    if device.backend != "cuda":
        return None
    most, blocks = _SM_LIMITS.get(device.nvidia, _OTHER_LIMITS)
    of_warp = max(256, -(-used.registers * device.warp_size // 256) * 256)
    counts = {
        "registers": _REGISTERS // of_warp // 4 * 4 // warps,  # whole warps in each of four partitions
        "shared memory": (device.shared_memory + _RESERVED) // (used.shared + _RESERVED),
        "warps": most // warps,
        "programs": blocks,
    }
    least = min(counts.values())
    limit = " and ".join(name for name, count in counts.items() if count == least)
    return Occupancy(max(1, least), max(1, least) * warps, most, limit)


def parts_us(problem: Plain, config: Config, device: Device) -> dict[str, float]:
    """Return the microseconds that each unit of the GPU needs by itself, the longest first.

    For a product these are lower bounds, except for the L2 cache. Device memory moves every operand once, and
    the busiest SM multiplies whole tiles, both at peak rate. Shared memory is written and read once for each
    tile of a and b. The L2 cache moves all that tiles request, at a rate fitted on an H200. For a
    permutation all parts are estimates by the formula of its family.
    """
    if isinstance(problem, PermuteProblem):
        box = config.family == boxes.BOX
        found = (boxes.parts_us if box else permute.parts_us)(config, problem, device)
        parts = dict(zip((MEMORY, SHARED if box else L2, INSTRUCTIONS, LATENCY), found, strict=True))
    else:
        problem, clocks_us, k = problem.core, device.clock_ghz * 1e3, config["BLOCK_K"]
        m, n = traffic.tile_of(config, problem)
        work = traffic.tiling(problem, config, device)
        iterations = -(-problem.k // k) / (work.programs / work.tiles)
        busiest = -(-work.programs // device.processors) * iterations
        if config.family == warpgroups.NAME and warpgroups.splits(config):
            made = warpgroups.tail(config, problem, device.processors)
            busiest = -(-problem.k // k) * (made.whole // device.processors + 1 / made.split)
        # tl.dot without tensor cores sums in float32.
        summed = replace(problem, dtype="float32") if config.family in skinny.FAMILIES else problem
        tflops = peak_tflops(summed, device)
        peak = tflops * 1e3 / device.processors / device.clock_ghz if tflops else rate(summed, device)
        requested = traffic.tiled(problem, config, device).total
        parts = {
            MEMORY: traffic.unique(problem).total / (device.memory_gbps * 1e3),
            L2: requested / (_L2_BYTES * device.processors * clocks_us),
            TENSOR_CORES if uses_tensor_cores(summed) else FMA: 2.0 * m * n * k * busiest / peak / clocks_us,
            SHARED: 2 * (m + n) * k * problem.itemsize * busiest / _SHARED_BYTES / clocks_us,
        }
    return dict(sorted(parts.items(), key=lambda item: (-item[1], item[0])))


def config_like(text: str, problem: Tiled, device: Device) -> Config:
    """Return the fastest predicted config that matches a text such as "tile BLOCK_M=128, num_warps=8".

    Raises InvalidValueError, with the possible values, if no config matches, and UnsupportedError if no
    config is legal at all.
    """
    options = ("num_warps", "num_stages", "num_ctas")
    found = [
        (each, {"family": each.family, **dict(each.kwargs)} | {name: getattr(each, name) for name in options})
        for each in waves.ranked(problem, device)
    ]
    names, before = set[str](), ""
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=") if "=" in word else ("family", "=", word)
        if not (name.isidentifier() and value) or name in names:
            raise InvalidValueError(f"config {text!r}, at {word!r}: expected NAME=VALUE, each name once")
        names.add(name)
        values = {own[name] for _, own in found if name in own}
        if not values:
            parameters = set[str]().union(*(own for _, own in found))
            listed, families = ", ".join(sorted(parameters)), ", ".join(FAMILIES[problem.op])
            raise InvalidValueError(
                f"config {text!r}: no config has {name}{before}{did_you_mean(name, parameters)}: "
                f"expected one of {listed}, or one of the families {families}"
            )
        found = [(config, own) for config, own in found if str(own.get(name)) == value]
        if not found:
            there = list(map(str, sorted(values)))
            hint = did_you_mean(value, there)
            if all(type(each) is int for each in values):  # digits that look alike say nothing
                hint = ""
                if value.isdecimal():
                    hint = f" (did you mean {min(values, key=lambda each: abs(each - int(value)))}?)"
            raise InvalidValueError(
                f"config {text!r}: no legal config for {problem.label} on {device.name} has "
                f"{name}={value}{before}{hint}: expected one of {', '.join(there)}"
            )
        before = f"{before or ' together with'} {word}"
    return found[0][0]


def explain(
    what: Callable[..., Any] | str | Tiled,
    *args: Any,
    device: Device | torch.device | str | None = None,
    config: Config | str | None = None,
    **kwargs: Any,
) -> Explanation:
    """Explain what a call costs with its config, what bounds its time, and how other configs compare.

        print(tritile.explain(tritile.matmul, a, b, config="tile BLOCK_M=64"))

    The kernel is compiled for the GPU, which need not be installed, and nothing is launched. Times are
    predicted. Measured ones come from `tritile.tune`, from `tritile tune`, or from the table of the GPU.

    Args:
        what: an operation, such as `tritile.matmul`, or its name, followed by the arguments of the call,
            which may be on the meta device. Or a problem, without arguments.
        args: positional arguments of the call.
        device: the GPU to explain for, as in `tritile.plan`. Default: the GPU of the tensors, else the
            current one.
        config: the config to explain, or text that names some of its parameters, which stands for the fastest
            predicted config that has them. Default: the plan's config, or the fastest of tritile's if the
            plan is to run torch's kernel.
        kwargs: keyword arguments of the call.

    Returns:
        An `Explanation`, which prints as a table.

    Raises:
        TritileError: the same errors as `tritile.plan`.
        InvalidValueError: the config is not legal for the problem, the call is in place, or there is no GPU
            to explain for.
        UnsupportedError: only torch computes the call; or it has a quantized weight; or groups, whose sizes
            only the GPU knows; or it is of a decorated kernel, whose bytes are unknown.

    Examples:
        >>> a = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
        >>> explanation = tritile.explain("matmul", a, a, device="h200", config="tile BLOCK_M=128")
        >>> explanation.config["BLOCK_M"], round(explanation.intensity)
        (128, 1365)
    """
    if config is not None and not isinstance(config, str | Config):
        raise InvalidValueError(
            f"explain: config is {config!r}: expected a Config, or text such as 'tile BLOCK_M=64'"
        )
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if device is None and not any(tensor.is_cuda for tensor in tensors):
        device = devices.current_gpu()
    request = "explain", what, args, kwargs, device, ("device", "config")
    chosen = call = plan_call(*request)
    if call.device == devices.HOST:
        raise InvalidValueError("explain: there is no GPU here: pass device=, such as device='h200'")
    is_tiled = isinstance(call.problem, Tiled)  # a decorated kernel's is not
    if is_tiled and call.problem.needs_torch:
        raise UnsupportedError(
            f"explain: only torch computes {call.problem.label}: tritile has no kernel to explain"
        )
    if is_tiled and call.config == aten.CONFIG:  # there is nothing to explain torch's kernels by
        with mode(backends="triton"):
            chosen = plan_call(*request)
    problem, gpu = chosen.problem, chosen.device
    if chosen.why == IN_PLACE:
        raise InvalidValueError("explain: a call in place has only one config: drop out=")
    if not isinstance(problem, Plain):
        expected = "expected a product or permutation of plain tensors"
        if isinstance(problem, GroupedProblem):
            expected += ", such as `problem.even`, the batch of equal groups"
        raise UnsupportedError(f"explain: {problem.label}: {expected}")
    own = config_like(config, problem, gpu) if isinstance(config, str) else config or chosen.config
    fault = illegal(own, problem, gpu)
    if fault is not None:
        raise InvalidValueError(f"explain: {own} for {problem.label} on {gpu.name}: {fault}")

    used, occupied, failure = None, None, ""
    try:
        kernel = compiled_for(problem, own, gpu)
        check_fits(kernel, gpu)
        used = resources(kernel)
        occupied = occupancy(used, int(kernel.metadata.num_warps), gpu)  # specialised warps included
    except (TuningError, OSError, subprocess.SubprocessError) as error:
        failure = str(error)
    persistent = dict(own.kwargs).get("PERSISTENT") is True
    at_once = gpu.processors * (1 if persistent or occupied is None else occupied.programs)

    legal = (t for t in trials(problem, gpu) if t.works and illegal(t.config, problem, gpu) is None)
    measured = {trial.config: trial.time for trial in legal}
    tabled = (each.find(problem) for each in gpu_tables.shipped(gpu) if each.device["name"] == gpu.name)
    if chosen.us is not None and (
        chosen.source in ("exact", "pinned") or (chosen.source == "table" and any(tabled))
    ):
        measured.setdefault(chosen.config, chosen.us)  # a table of another GPU says nothing about this one
    name = class_of(problem)
    found = gpu_tables.predictor(name, gpu)
    times = {}
    if found and name:
        count = len(found[0].classes[name].columns)
        times = {each: us for us, each in found[0].ranked(name, problem, gpu, count)}
    # The next best, no two with the same tile: first by measured, then by predicted times.
    by_tile: dict[tuple[int, ...], Config] = {}
    fastest = sorted(measured, key=lambda each: (measured[each], each.key))
    for each in (own, *fastest, *(times or waves.ranked(problem, gpu))):
        by_tile.setdefault(waves.shape_of(each), each)

    def cost(config: Config) -> Cost:
        parts = parts_us(problem, config, gpu)
        predicted = times[config] if config in times else waves.predict_us(config, problem, gpu)
        us, longest = measured.get(config), next(iter(parts))
        bound = longest if (us or predicted) < _UNEXPLAINED * parts[longest] else LATENCY
        tiled, tiling = traffic.tiled(problem, config, gpu), traffic.tiling(problem, config, gpu)
        return Cost(config, predicted, us, tiled, tiling, parts, bound)

    mine, *others = map(cost, list(by_tile.values())[: _ALTERNATIVES + 1])
    source = chosen.source if own == chosen.config else "requested"
    return Explanation(
        **vars(mine), problem=problem, source=source, device=gpu, untiled=traffic.untiled(problem),
        unique=traffic.unique(problem), at_once=at_once, resources=used, occupancy=occupied, failure=failure,
        alternatives=tuple(others), call=call,
    )  # fmt: skip
