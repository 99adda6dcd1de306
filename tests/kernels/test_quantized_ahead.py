"""Products with quantized weights compiled for GPUs that are not here: they fit, and unpack in registers."""

import itertools
import re
from dataclasses import replace

import pytest

import tritile
from tests.ahead import H200, kernels_of, later
from tests.configs import packed_weights as tile
from tritile.choose import aten, waves
from tritile.core.device import target_device
from tritile.core.problem import QuantizedProblem
from tritile.families import launching
from tritile.families.quantized.family import scales_sums, shared_bytes
from tritile.families.space import legal_configs
from tritile.lab import warm
from tritile.runtime.ahead import resources

KINDS = list(itertools.product((4, 8), ("bfloat16", "float16"), (False, True)))


def in_turn(*cases):
    """Every kind with one of these four cases, so that each meets both of all that tells kinds apart."""
    given = [
        ((*kind, *case), (i ^ i >> 1) & 3 != j)
        for i, kind in enumerate(KINDS)
        for j, case in enumerate(cases)
    ]
    return [later(*values) if waits else values for values, waits in given]


DECODE, PREFILL = tile(16, 64, 128, 4, 4, split=2), tile(128, 128, 128, 8, 2)


def problem(m, bits=4, dtype="bfloat16", zeros=False, group=128, **more):
    return QuantizedProblem(m, 4096, 4096, dtype, bits, group, zeros, **more)


@pytest.mark.parametrize(
    ("bits", "dtype", "zeros", "sizes", "family"),
    in_turn(*itertools.product([(16, 64, 128, 4, 4), (128, 128, 128, 8, 3)], ["tile", "descriptor"])),
    ids=str,
)
def test_weights_unpacked_in_registers(bits, dtype, zeros, sizes, family):
    """The loop stores nothing to shared memory and turns no layout over; all its loads are asynchronous."""
    config = tile(*sizes, family=family)
    one = problem(4096, bits, dtype, zeros)
    kernel = launching.compiled_for(one, config, H200)
    ptx, text = kernel.asm["ptx"], kernel.asm["ttgir"]
    loop = text[text.index("scf.for") : text.index("scf.yield")]
    assert "local_store" not in loop
    assert "local_alloc" not in loop
    assert "tt.load" not in loop
    by_tma = family == "descriptor"
    assert loop.count("async_copy_global_to_local") == 3 + zeros - by_tma
    assert loop.count("async_tma_copy_global_to_local") == by_tma
    assert loop.count("local_load") == 2 + zeros + scales_sums(config, one.group_size)  # the scales twice
    assert "wgmma.mma_async" in ptx
    assert re.search(r"cp\.async\.cg[^;]* 0x10", ptx)
    assert re.search(r"ld\.shared\.v4", ptx)  # words, four at a time
    opened = ptx[: ptx.rindex("wgmma.mma_async")]
    body = opened[opened.rindex("$L__BB") :]  # the label at the head of the loop
    assert "st.shared" not in body
    assert "stmatrix" not in body


@pytest.mark.parametrize(
    ("bits", "dtype", "zeros", "group", "k"), in_turn(*itertools.product([32, 128], [4096, 4100])), ids=str
)
def test_weights_unpacked_in_memory(k, group, bits, dtype, zeros):
    """Where torch multiplies: 16 bytes a thread of words and of floats; all threads of an SM fit at once."""
    one = replace(problem(4096, bits, dtype, zeros, group, bias=zeros), k=k)
    (kernel,) = kernels_of(one, aten.CONFIG)
    assert kernel.metadata.name == "unpack"
    ptx, taken = kernel.asm["ptx"], resources(kernel)
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    assert "ld.global.v4.b32" in ptx
    assert set(re.findall(r"ld\.global\S*", ptx)) <= {"ld.global.v4.b32", "ld.global.b32"}
    assert ptx.count("griddepcontrol") == 2
    assert taken.spills == 0
    assert taken.registers <= 40
    assert taken.shared <= 4096


@pytest.mark.parametrize("name", ["nvidia-h200", "sm_80", "gfx942"])
def test_compiled_ahead_unpacks_for_torch(name):
    """Of any number of rows, wherever torch may; by a plan where it is planned."""
    device, many, one = target_device(name), problem(4096), problem(1)
    assert aten.CONFIG not in warm.calls_of(many, H200), "tests leave torch out"
    with tritile.mode(backends="triton,aten"):
        assert warm.calls_of(many, H200)[aten.CONFIG] == [many]
        assert aten.CONFIG not in warm.calls_of(one, H200)
        assert warm.calls_of(one, H200, any_rows=True)[aten.CONFIG] == [one]
        assert aten.CONFIG not in warm.calls_of(replace(many, invariant=True), H200, any_rows=True)
    texts = [kernels_of(each, aten.CONFIG, device)[0].hash for each in (one, many)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("m", "bits", "zeros"), [(1, 4, False), (300, 8, True), later(300, 4, True), later(1, 8, False)]
)
def test_formulas_cover_the_space(m, bits, zeros):
    """Every legal config has a time, and shared memory that the compiled kernel does not fall short of."""
    one = problem(m, bits, zeros=zeros)
    configs = legal_configs(one, H200)
    times = [waves.predict_us(config, one, H200) for config in configs]
    assert len(configs) > 50
    assert min(times) > one.bytes / (H200.memory_gbps * 1e3)
    config = configs[len(configs) // 3]
    taken = resources(launching.compiled_for(one, config, H200))
    assert shared_bytes(config, one, H200) <= taken.shared <= H200.shared_memory
