"""Every family of matmul kernels on a GPU: answers, the same bits each time, streams, graphs, threads."""

import os
import subprocess
import sys

import pytest
import torch

import tritile
from tests.configs import ON_GPU, tma, warpgroups
from tests.launched import captured, in_threads, launched
from tests.reference import assert_product, bytes_of, frame, guard_intact, placed, values
from tritile.core import device as devices
from tritile.ops.products import matmul_call
from tritile.planning import model
from tritile.runtime import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
FAMILIES = "tile", "descriptor", "warpgroups"
# (a, b) as they lie: N in rows, T turned, S with gaps, O at an odd address
TURNS = {"NN": ("row", "row"), "NT": ("row", "column"), "TN": ("column", "row"), "TT": ("column", "column")}
TURNS |= {"SS": ("sparse", "strided"), "OO": ("offset", "offset"), "sliced": ("sliced", "column_sliced")}


# Each family with one, two and three consumers, persistent or not, stored at once and by halves, with sides
# that are powers of two and not.
CONFIGS = [
    *(config for config in ON_GPU if config.family != "tile"),
    tma(128, 256, 64, 8, 3, persistent=True, subtiles=2),
    tma(16, 64, 128, 4, 4),
    tma(16, 16, 64, 2, 5, split=4),
    warpgroups(64, 16, 64, 1, 8),
    warpgroups(128, 128, 64, 1, 3, persistent=True),
    warpgroups(192, 160, 64, 3, 3),
    warpgroups(256, 144, 64, 2, 3, persistent=True, subtiles=2),
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


def run(config, a, b, out):
    call = matmul_call(a, b, out, "ieee")
    return launched(call, config), call


def operands(m, n, k, dtype, turn="NN", batch=()):
    a, b = values((*batch, m, k), dtype, 0, "cuda"), values((*batch, k, n), dtype, 1, "cuda")
    return placed(a, TURNS[turn][0]), placed(b, TURNS[turn][1])


# Operands read where they lie; copied first, which makes rows of them all; one tile of rows, many of columns.
LAID = [((256, 320, 512), turn) for turn in ("NN", "NT", "TN", "TT")]
LAID += [((301, 203, 517), turn) for turn in ("TN", "SS")] + [((77, 515, 259), turn) for turn in ("NT", "OO")]


@every_config
@pytest.mark.parametrize(("size", "turn"), LAID, ids=str)
def test_layouts_and_ragged_sizes(config, size, turn):
    a, b = operands(*size, torch.bfloat16, turn)
    buffer, out = frame((size[0], size[1]), a.dtype, "row", "cuda")
    run(config, a, b, out)
    assert_product(out, a, b)
    assert guard_intact(buffer, out)


@every_config
def test_graphs_replay_on_any_stream(config):
    a, b = operands(131, 97, 611, torch.bfloat16)
    out = torch.empty(131, 97, dtype=a.dtype, device="cuda")
    prepared, call = run(config, a, b, out)
    outs = [torch.empty_like(out) for _ in range(2)]

    def thrice(own):
        graph, _ = captured(lambda: [prepared(*call.tensors[:2], own) for _ in range(3)])
        return graph

    graphs = [thrice(own) for own in outs]
    for got in outs:
        got.fill_(float("nan"))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):
        graphs[0].replay()
        with torch.cuda.stream(side):
            graphs[1].replay()
        prepared(call.a.tensor, call.b.tensor, out)
    torch.cuda.synchronize()
    for got in (out, *outs):
        assert_product(got, a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_capture_from_a_cold_plan(family, monkeypatch):
    a, b = operands(192, 200, 2056, torch.bfloat16)
    torch.matmul(a, b)
    device = devices.gpu(0)
    original = model.ranked
    monkeypatch.setattr(model, "pick", lambda problem, device: original(problem, device, family)[0])
    tritile.forget()
    graph = torch.cuda.CUDAGraph()
    with tritile.mode("off"), torch.cuda.graph(graph):
        out = tritile.matmul(a, b)
    with tritile.mode("off"):
        assert tritile.plan(tritile.matmul, a, b).config.family == family
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_product(out, a, b)
    assert device.nvidia >= 90 or family == "tile"
    tritile.forget()


@every_config
def test_threads_share_a_launch(config):
    a, b = operands(517, 390, 1030, torch.bfloat16)
    out = torch.empty(517, 390, dtype=a.dtype, device="cuda")
    prepared, call = run(config, a, b, out)
    wanted = bytes_of(out)
    torch.cuda.synchronize()

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [torch.empty_like(out) for _ in range(30)]
            for got in outs:
                prepared(call.a.tensor, call.b.tensor, got)
            torch.cuda.current_stream().synchronize()
            assert all(torch.equal(bytes_of(got), wanted) for got in outs)

    in_threads(*[work] * 6)


@every_config
def test_a_thread_that_never_used_the_gpu(config):
    """Such a thread has no context of the driver, and without memory to ask for gets none by itself."""
    a, b = operands(256, 264, 520, torch.bfloat16)
    out = torch.empty(256, 264, dtype=a.dtype, device="cuda")
    prepared, call = run(config, a, b, out)
    wanted, other = bytes_of(out), torch.zeros_like(out)
    torch.cuda.synchronize()
    in_threads(lambda: prepared(call.a.tensor, call.b.tensor, other))
    assert torch.equal(bytes_of(other), wanted)


@pytest.mark.parametrize("polls", [1, 64])
@pytest.mark.parametrize(
    ("size", "config"),
    [
        ((150, 130), tma(64, 64, 64, 4, 4, split=2)),
        ((150, 130), tma(64, 64, 64, 4, 4, split=8)),
        ((64, 100), tma(128, 128, 64, 4, 4, split=64)),
        ((15, 13), tma(16, 16, 64, 1, 5, split=128)),
    ],
    ids=str,
)
def test_shared_k_repeats_its_bits_whether_programs_wait_or_give_up(monkeypatch, size, config, polls):
    a, b = operands(*size, 64 * 128, torch.bfloat16)
    wanted = None
    for looks in (polls, polls, 0):
        monkeypatch.setattr("tritile.families.common.grids.POLLS", looks)
        out = torch.empty(size, dtype=a.dtype, device="cuda")
        call = matmul_call(a, b, out, "ieee")
        ready = launch.prepare(call, config)
        for _ in range(50):
            out.fill_(float("nan"))
            ready(*call.tensors)
            wanted = bytes_of(out) if wanted is None else wanted
            assert torch.equal(bytes_of(out), wanted)
    assert_product(out, a, b)


_CAPTURE_FIRST = """
import torch, tritile
a, b = (torch.randn(256, 8192, device="cuda").bfloat16() for _ in range(2))
torch.matmul(a, b.T)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = tritile.matmul(a, b.T)
assert tritile.plan(tritile.matmul, a, b.T).config["SPLIT_K"] > 1
for _ in range(3):
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    error = (out.double() - a.double() @ b.T.double()).norm() / out.double().norm()
    assert error < 1e-2, error
"""


def test_a_capture_is_the_first_that_a_process_does(tmp_path):
    env = dict(os.environ, TRITILE_CACHE_DIR=str(tmp_path), TRITILE_MODE="off")
    done = subprocess.run([sys.executable, "-c", _CAPTURE_FIRST], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
