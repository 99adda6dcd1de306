"""Kernels have just the parameters that native launches lay out, on every version of Triton."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch

from tests.ahead import (
    RAGGED,
    SQUARE,
    TURN,
    groups,
)
from tests.configs import HAS_PAIRS, boxed, pair, split, tile, tma, turned
from tritile.core.call import call_for
from tritile.core.device import target_device
from tritile.families.work import work_of
from tritile.runtime import native
from tritile.runtime.ahead import compiling_for
from tritile.runtime.launch import Pointer, _compiled, pointers_to
from tritile.runtime.native import Loaded
from tritile.runtime.work import COUNTERS, Buffer, Descriptor

BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "b32": 4, "b64": 8, "f32": 4, "f64": 8}
CASES = [
    (SQUARE, tile(128, 128, 32, 8, 3)),  # as others compile, that each is compiled once
    (RAGGED, tile(32, 64, 32, 4, 3)),
    (SQUARE, tma(64, 64, 64, 4, 4, split=4)),
    (RAGGED, tma(128, 128, 64, 8, 3, persistent=True)),
    (SQUARE, groups(256, 144, 64, 2, 2, persistent=True, subtiles=2)),
    (RAGGED, groups(192, 96, 64, 3, 3)),
    (RAGGED, split(128, 128, 2, 4)),
    *([(SQUARE, pair(192, 128, 3, 4, persistent=True, subtiles=2))] * HAS_PAIRS),
    (TURN, turned(64, 64, 4)),
    (TURN, boxed(8192, 64, 16)),
]


def sizes_of(kernel):
    """Bytes of each parameter, by the kernel's PTX."""
    text = re.search(r"\.entry\s+\w+\s*\((.*?)\)\s", kernel.asm["ptx"], re.DOTALL)[1]
    found = re.findall(r"\.param\s+(?:\.align \d+ )?\.(\w+)[^,\[]*(?:\[(\d+)\])?", text)
    return [int(array) if array else BYTES[kind] for kind, array in found]


class Driver(SimpleNamespace):
    """A CUDA driver that knows the parameters of a kernel, and launches nothing.

    It notes how descriptors are encoded, what they are moved to, and what is launched.
    """

    def __init__(self, sizes, **own):
        super().__init__(sizes=sizes, encoded=[], moved={}, launched=[], asked=[], **own)

    def cuCtxSetCurrent(self, context):
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index >= len(self.sizes):
            return 1
        size.value = self.sizes[index]
        return 0

    def cuTensorMapEncodeTiled(self, table, kind, rank, pointer, shape, strides, *rest):
        self.encoded.append((table.value, [*shape], [*strides][: rank - 1]))
        return 0

    def cuTensorMapReplaceAddress(self, table, address):
        self.moved[table] = address
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        asked = native._Config.from_address(config)
        attributes = (native._Attribute * asked.count).from_address(asked.attributes)
        words = {each.id: [*memoryview(each).cast("B")[8:20].cast("I")] for each in attributes}
        self.asked.append(([*asked.grid], words))
        self.launched.append([*(ctypes.c_uint64 * len(self.sizes)).from_address(parameters)])
        return 0


def compiled(problem, config, monkeypatch):
    """The steps of a call with their kernels, and the names of its buffers; no driver is needed."""
    device = target_device("nvidia-h200")

    def make(dtype, elements=0):
        return Pointer(0, getattr(torch, dtype))

    with compiling_for(device):
        call = call_for(problem)
        work = work_of(call, config, device.processors, True)
        buffers = pointers_to(call.buffers) | {
            name: make(section.dtype) for name, section in work.scratch.items()
        }
        buffers |= {COUNTERS: make("int64")} if work.counters else {}
        kernels = [_compiled(step, buffers) for step in work.steps]
    monkeypatch.setattr(native, "_context_of", lambda device: None)
    monkeypatch.setattr(native, "loaded", lambda kernel, shared: Loaded(1, 0, 0))
    return zip(work.steps, kernels, strict=True), tuple(buffers)


def test_driver_without_parameters_launches_nothing(monkeypatch):
    problem, config, *_ = CASES[0]
    steps, buffers = compiled(problem, config, monkeypatch)
    step, kernel = next(steps)
    silent = Driver((), cuFuncGetParamInfo=lambda *given: 999)
    monkeypatch.setattr(native, "_driver", lambda: silent)
    monkeypatch.setattr(native, "_sizes", {})
    for _ in range(2):  # it is asked again
        with pytest.raises(ValueError, match="999 while asking for parameter 0"):
            native.NativeLaunch(kernel, step.grid, step.named, dict.fromkeys(buffers, 4096), 0)


@pytest.mark.parametrize("change", ["swapped", "another", "narrower"])
def test_swapped_parameters_are_refused(monkeypatch, change):
    """By what Triton itself takes the kernel's parameters for: its own launcher then makes the call."""
    steps, buffers = compiled(RAGGED, tile(32, 64, 32, 4, 3), monkeypatch)
    step, kernel = next(steps)
    monkeypatch.setattr(native, "_driver", lambda: Driver(sizes_of(kernel)))
    native.NativeLaunch(kernel, step.grid, step.named, dict.fromkeys(buffers, 4096), 0)
    one, other, *_ = (name for name, kind in kernel.src.signature.items() if kind == "i32")
    names, args = {"swapped": {one: other, other: one}, "another": {one: "new"}}.get(change, {}), step.named
    if change == "narrower":
        args = {**args, one: 1 << 31}
    signature = {names.get(name, name): kind for name, kind in kernel.src.signature.items()}
    monkeypatch.setattr(kernel.src, "signature", signature)
    with pytest.raises(ValueError, match=r"parameters are|of type i32"):
        native.NativeLaunch(kernel, step.grid, args, dict.fromkeys(buffers, 4096), 0)


@pytest.mark.parametrize(("problem", "config"), CASES, ids=lambda value: str(value).replace(" ", "_"))
def test_buffers_reach_named_parameters(problem, config, monkeypatch):
    """Where it lies at this launch, be it behind a pointer or a descriptor, whose strides are in bytes."""
    steps, buffers = compiled(problem, config, monkeypatch)
    for step, kernel in steps:
        driver = Driver(sizes_of(kernel))
        monkeypatch.setattr(native, "_driver", lambda driver=driver: driver)
        launch = native.NativeLaunch(kernel, step.grid, step.named, dict.fromkeys(buffers, 4096), 0)
        assert len(launch._parameters) == len(driver.sizes)
        for turn in (0, 1):  # each where another was before, as operands that change places
            places = [(place + turn) % len(buffers) for place in range(len(buffers))]
            lies = {name: (1 << 20) + 256 * place for name, place in zip(buffers, places, strict=True)}
            launch([*lies.values()], 0)
            pointers = [value.buffer for value in step.values if isinstance(value, Buffer)]
            first = ctypes.addressof(launch._buffers)
            slots = range(first, first + ctypes.sizeof(launch._buffers))
            found = [ctypes.c_uint64.from_address(at).value for at in driver.launched[-1] if at in slots]
            assert found == [lies[name] for name in pointers]
            described = [value for value in step.values if isinstance(value, Descriptor)]
            for (table, shape, strides), one in zip(driver.encoded, described, strict=True):
                assert driver.moved[table] == lies[one.buffer]
                size = strides[0] // one.strides[-2]
                assert shape == [*one.shape[::-1]]
                assert (size in (1, 2, 4), strides) == (True, [size * s for s in one.strides[-2::-1]])


PAIR = {4: [2, 1, 1], 5: [1, 0, 0]}


@pytest.mark.parametrize(
    ("config", "grid", "more"),
    [
        (groups(256, 144, 64, 2, 2, persistent=True, subtiles=2), [132, 1, 1], {}),
        *[(pair(192, 128, 3, 4, persistent=True, subtiles=2), [132, 1, 1], PAIR)] * HAS_PAIRS,
    ],
    ids=["warpgroups", "pairs"][: 1 + HAS_PAIRS],
)
def test_launches_start_early_with_clusters(config, grid, more, monkeypatch):
    """By the driver's attributes 6, 4 and 5. The driver counts CTAs in a grid, Triton clusters."""
    steps, buffers = compiled(SQUARE, config, monkeypatch)
    ((step, kernel),) = steps
    driver = Driver(sizes_of(kernel))
    monkeypatch.setattr(native, "_driver", lambda: driver)
    native.NativeLaunch(kernel, step.grid, step.named, dict.fromkeys(buffers, 4096), 0)([1 << 20] * 3, 0)
    assert driver.asked == [(grid, more | {6: [1, 0, 0]})]
