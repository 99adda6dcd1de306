"""The order of what kernels do to memory and by tensor cores, as they are compiled for Hopper."""

import itertools
import re
from dataclasses import replace

import pytest

from tests.ahead import H200, compiled, instructions, kernels_of, later
from tests.configs import HAS_PAIRS, boxed, of_groups, packed_weights, pair, tma, turned, warpgroups
from tritile.core.call import Memory, PermuteCall
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import GroupedProblem, MatmulProblem, QuantizedProblem
from tritile.families import launching
from tritile.families.launching import compiles_of
from tritile.families.permute.family import in_place
from tritile.runtime.ahead import compiling_for, resources

SQUARE = MatmulProblem(1, 1024, 1024, 1024, "float16", "float16")
TURN, KEPT = PermuteProblem.transposed(1, 1024, 1024, 2), PermuteProblem.of((64, 64), (128, 1), (64, 1), 2)
GROUPS = GroupedProblem(8, 4096, 1024, 1024, "float16", "float16")
PACKED = QuantizedProblem(1024, 1024, 1024, "float16", 4, 128)
# PTX that reads or writes global memory.
GLOBAL = re.compile(r"^\s*(@\S+ )?(ld|st|atom|red|cp\.async(\.bulk)?(\.tensor)?)\S*\.global", re.MULTILINE)
# In Triton's own language, before a compiler adds barriers of its own.
STEPS = re.compile(r"^\s*(?:%\S+ = )?(?:tt\.(load|store|atomic)|(?:gpu|ttg)\.\w*(barrier))", re.MULTILINE)


def shared_k(split):
    return tma(64, 64, 64, 4, 4, split=split)


def steps(kernel):
    return [found[1] or found[2] for found in STEPS.finditer(kernel.asm["ttir"])]


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (TURN, turned(64, 64)),
        (KEPT, turned(32, 32)),
        (TURN, boxed(8192, 64, 16)),
        (SQUARE, shared_k(1)),
        (SQUARE, shared_k(4)),
        (replace(SQUARE, epilogue="gated silu"), shared_k(1)),
        (GROUPS, of_groups(64, 64, 64, persistent=False)),
        (PACKED, packed_weights(64, 64, 128, 4, 4)),
        (PACKED, packed_weights(64, 64, 128, 4, 4, family="descriptor")),
    ],
    ids=["turn", "copy", "box", "product", "shared K", "gated", "groups", "int4", "int4 by TMA"],
)
def test_early_kernel_waits_for_memory(problem, config):
    ptx = launching.compiled_for(problem, config, H200).asm["ptx"]
    wait, first = ptx.find("griddepcontrol.wait"), GLOBAL.search(ptx)
    assert first
    assert 0 < wait < first.start()


def test_warpgroups_wait_before_tiles():
    """All else that they touch comes after tiles, whatever the order in which warps' code is written down."""
    ptx = compiled(SQUARE, warpgroups(128, 128, 64, 2, 4)).asm["ptx"]
    wait, first = (
        ptx.find("griddepcontrol.wait"),
        re.search(r"cp\.async\.bulk\.tensor\S*\.shared\S*\.global", ptx),
    )
    assert 0 < wait < first.start()


def test_parts_are_written_before_counted():
    order = steps(launching.compiled_for(SQUARE, shared_k(4), H200))
    assert order[:3] == ["store", "barrier", "atomic"]


@pytest.mark.parametrize("words", [1, 2])
def test_swapped_tiles_are_read_first(words):
    x = Memory("x", "int64" if words == 2 else "int16")
    problem = PermuteProblem.transposed(1, 100, 100, 16 if words == 2 else 2)
    call = PermuteCall(problem, x, x, in_place=True)
    with compiling_for(H200):
        (compiled,) = compiles_of(call, in_place(problem), H200)
        kernel = compiled()
    assert kernel.name == "transpose_in_place"
    assert steps(kernel) == ["load", "load", "barrier", "store", "store"]


with_pairs = pytest.mark.skipif(not HAS_PAIRS, reason="pairs are made with triton 3.7")


@with_pairs
def test_pair_meets_before_copies():
    """No CTA copies to the other, or arrives there, before that one's barriers are made."""
    ptx = compiled(SQUARE, pair(128, 192, 2, 4)).asm["ptx"]
    bodies = re.split(r"barrier\.cluster\.wait\.acquire", ptx)
    copies = re.compile(r"cp\.async\.bulk\.tensor\S*\.multicast::cluster")
    assert len(bodies) > 3  # two consumers, the producer, warps that idle
    assert not copies.search(bodies[0])
    assert "mbarrier.arrive.shared::cluster" not in bodies[0]
    assert 0 < ptx.find("griddepcontrol.wait") < copies.search(ptx).start()


@with_pairs
def test_pair_releases_both_ctas():
    """Of each consumer a thread a warp in its own CTA, and one of the second CTA's in the first."""
    ptx = compiled(SQUARE, pair(128, 192, 2, 4)).asm["ptx"]
    mapped = re.findall(r"@(\w+) mapa\.shared::cluster\.u32 %\w+, %\w+, (\w+);", ptx)
    assert mapped == 2 * [("own", "rank"), ("other", "0")]


def test_warpgroups_store_own_rows():
    """No interpreter runs Gluon: masks, and where the second consumer begins, are read as compiled."""
    ragged = MatmulProblem(1, 1001, 1003, 1024, "float16", "float16", b_layout="column", out_align=2)
    text = compiled(ragged, warpgroups(128, 128, 32, 2, 4)).asm["ttgir"]
    masks = re.findall(r"arith\.cmpi (\w+), [^:]*: tensor", text)
    assert masks
    assert set(masks) == {"slt"}
    # One for what the producer fetches, one for what the second consumer stores.
    assert len(re.findall(r"arith\.addi %\w+, %c64_i32\w*(?: \{[^}]*\})? :", text)) == 2


def test_warpgroups_release_previous_stage():
    """While tensor cores may still read a stage, the producer must not fill it."""
    text = compiled(SQUARE, warpgroups(128, 128, 64, 2, 4)).asm["ttgir"]
    places, multiplied, pending, releases = {}, None, None, []
    for line in text.splitlines():
        if found := re.search(r"(%\w+) = ttg\.memdesc_index %\w+\[(%[\w#]+)\]", line):
            places[found[1]] = found[2]
        elif found := re.search(r"ttng\.wait_barrier (%\w+),", line):
            multiplied, pending = places[found[1]], None
        elif found := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
            pending = int(found[1])
        elif (found := re.search(r"ttng\.arrive_barrier (%\w+),", line)) and pending is not None:
            releases.append((pending, places[found[1]] == multiplied))
    assert releases == 2 * [(1, False), (0, False)]  # in the loop of each consumer, and after it


def test_widest_group_tile_one_loop():
    """The K loops of tiles are one, so that a tile's loads begin before the one ahead of it is stored."""
    kernel = compiled(
        replace(GROUPS, groups=64, m=16384, k=4096, n=2048, b_layout="column"),
        of_groups(128, 256, 64, 8, 3, subtiles=2),
    )
    assert resources(kernel).spills == 0
    loops = [line for line in kernel.asm["ttgir"].splitlines() if "scf.for" in line]
    assert len([line for line in loops if "tensor<128x256xf32" in line]) == 1
    assert "ttng.async_tma_copy_local_to_global" in kernel.asm["ttgir"]


LARGE = MatmulProblem(1, 4096, 4096, 4096, "float16", "float16")
EPILOGUES = "gated silu", "bias=row residual=full silu"
LAID = list(itertools.product(("row", "column"), repeat=2))
RUN_ON = [
    *(((128, 128), replace(LARGE, a_layout=a, b_layout=b)) for a, b in LAID),
    ((64, 256), replace(LARGE, b_layout="column")),
    *(later((64, 256), replace(LARGE, a_layout=a, b_layout=b)) for a, b in (LAID[0], *LAID[2:])),
    *(((128, 128), replace(LARGE, b_layout="column", epilogue=text)) for text in EPILOGUES),
]


@pytest.mark.parametrize(("tile", "problem"), RUN_ON, ids=str)
def test_tensor_cores_run_on(problem, tile, tmp_path):
    """ptxas makes each wait for the one before where it does not see that all is well."""
    how = {"stages": 3, "persistent": True} if problem.epilogue else {"stages": 4}
    text = instructions(compiled(problem, tma(*tile, 64, 8, **how)), tmp_path)
    assert 1 <= text.count("WARPGROUP.ARRIVE") < text.count("HGMMA")


PARTS = replace(LARGE, dtype="float32", out_dtype="float32", precision="fp16x3")


def loops(text):
    """The bodies of a program's loops: from a label to a jump back to it."""
    lines, places, bodies = text.splitlines(), {}, []
    for i, line in enumerate(lines):
        label = re.match(r"\s*\.(L_x_\d+):", line)
        jump = re.search(r"BRA.*`\(\.(L_x_\d+)\)", line)
        if label:
            places[label[1]] = i
        elif jump and jump[1] in places:
            bodies.append("\n".join(lines[places[jump[1]] : i]))
    return bodies


@pytest.mark.parametrize(
    ("config", "layouts"),
    [
        (warpgroups(128, 192, 64, 2, 3, persistent=True), ("row", "row")),
        later(warpgroups(192, 128, 64, 3, 3, persistent=True), ("row", "column")),
        (warpgroups(64, 96, 64, 1, 4), ("row", "row")),
        later(warpgroups(128, 192, 64, 2, 3, persistent=True), ("row", "column")),
        later(warpgroups(64, 96, 64, 1, 4), ("row", "column")),
    ],
    ids=str,
)
def test_warpgroups_sum_around_inner_loop(config, layouts, tmp_path):
    problem = replace(PARTS, a_layout=layouts[0], b_layout=layouts[1])
    kernel = kernels_of(problem, config)[-1]
    assert resources(kernel).spills == 0
    bodies = [body for body in loops(instructions(kernel, tmp_path)) if "HGMMA" in body]
    inner = [body for body in bodies if body.count("WARPGROUP.DEPBAR") == 1]
    assert len(inner) >= config["CONSUMERS"]  # of small terms
    assert all(body.count("FADD") == 0 for body in inner)
    assert sum(body.count("FADD") > 0 for body in bodies) >= config["CONSUMERS"]  # of large ones
    sums = config["BLOCK_M"] // config["CONSUMERS"] * config["BLOCK_N"] // 128  # of a thread
    assert 4 * sums in [body.count("FADD") for body in bodies]  # `carried_sum`, as it is written


BY_DESCRIPTOR = (
    tma(128, 128, 64, 8, 4, persistent=True),
    later(tma(128, 128, 64, 8, 4)),
    later(tma(64, 64, 64, 4, 4, split=4)),
)


@pytest.mark.parametrize("config", BY_DESCRIPTOR, ids=str)
def test_descriptor_kernels_run_on_too(config, tmp_path):
    kernel = kernels_of(PARTS, config)[-1]
    assert resources(kernel).spills == 0
    text = instructions(kernel, tmp_path)
    assert 1 <= text.count("WARPGROUP.ARRIVE") < text.count("HGMMA")
    assert text.count("FADD") > 0  # the compiler has not made one sum of it
