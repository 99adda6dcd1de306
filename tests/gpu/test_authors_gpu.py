"""The authors' kernels on a GPU: every listed config is right, and so is what tuning chooses."""

import warnings

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

import tritile
from authors import SUBJECTS
from tests.launched import needs_memory
from tests.unit.test_check import outcome_of
from tritile.errors import IsolationWarning
from tritile.families.matmul_tile.family import FAMILY
from tritile.ops.products import matmul_call
from tritile.runtime.launch import _bound
from tritile.tune import kernels

pytestmark = pytest.mark.gpu
ROW_SHAPES = [(37, 1), (37, 1000), (64, 4096), (2, 70001)]
ATTENTION_SHAPES = [(1, 2, 1, 64, 0), (2, 3, 317, 64, 1), (1, 2, 512, 128, 1), (2, 2, 1009, 128, 0)]
SHAPES = {"softmax": ROW_SHAPES, "layer_norm": ROW_SHAPES, "attention": ATTENTION_SHAPES}
CASES = [
    pytest.param(name, shape, dtype, id=f"{name}-{'x'.join(map(str, shape))}-{str(dtype)[6:]}")
    for name, shapes in SHAPES.items()
    for shape in shapes
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    if dtype != torch.float32 or name != "attention"
]


def wrong(name, given):
    """How far each output is from torch's answer in double precision, over what rounding allows."""
    wide = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    found = {}
    for argument, expected in SUBJECTS[name].reference(**wide).items():
        got = given[argument]
        # p is rounded to the inputs' type in attention, and torch's x is the same rounded one elsewhere.
        allowed = torch.finfo(got.dtype).eps + 64 * torch.finfo(torch.float32).eps
        error = (got.double() - expected.double()).abs() / (allowed * (1 + expected.double().abs()))
        found[argument] = float(error.nan_to_num(nan=float("inf")).max())
    return {argument: error for argument, error in found.items() if error > 1}


def poison(given):
    for name in ("out_ptr", "mean_ptr", "rstd_ptr"):
        if name in given:
            given[name].fill_(float("nan"))


@pytest.mark.parametrize(("name", "shape", "dtype"), CASES)
def test_the_first_config_is_right(name, shape, dtype):
    subject = SUBJECTS[name]
    given = subject.inputs(shape, dtype)
    subject.kernel[subject.grid(**given)](**given, **subject.configs[0].all_kwargs())
    assert wrong(name, given) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [("softmax", (37, 5003)), ("layer_norm", (37, 5003)), ("attention", (2, 2, 717, 128, 1))],
)
def test_every_config_is_right(name, shape):
    subject = SUBJECTS[name]
    given, ran = subject.inputs(shape, torch.bfloat16), 0
    for config in subject.configs:
        poison(given)
        try:
            subject.kernel[subject.grid(**given)](**given, **config.all_kwargs())
        except OutOfResources:  # a smaller GPU than it was listed for
            continue
        assert wrong(name, given) == {}, config
        ran += 1
    assert ran >= len(subject.configs) // 2


@pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")
@pytest.mark.parametrize(("name", "shape"), [(name, shapes[1]) for name, shapes in SHAPES.items()])
def test_tuned_remembered_unmeasured_in_graph(name, shape):
    subject = SUBJECTS[name]
    given = subject.inputs(shape, torch.float16)
    untuned, kernel = (tritile.autotune(subject.configs[:4], subject.key)(subject.kernel) for _ in range(2))
    with tritile.mode("cached"):
        untuned[subject.grid(**given)](**given)  # compiled and loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with tritile.mode("tune"), torch.cuda.graph(graph):
        untuned[subject.grid(**given)](**given)
    poison(given)
    graph.replay()
    torch.cuda.synchronize()
    assert wrong(name, given) == {}
    tritile.forget()
    for mode in ("tune", "strict"):
        poison(given)
        with tritile.mode(mode):
            kernel[subject.grid(**given)](**given)
        assert wrong(name, given) == {}
        tritile.forget()
    assert kernel.best_config in subject.configs[:4]


@pytest.mark.serial
@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_offsets_beyond_32_bits(name):
    rows, columns = 5, 1000
    stride = 2**29 + 8  # rows of 1000 elements, 1 GiB apart
    needs_memory(12)
    subject = SUBJECTS[name]
    given = subject.inputs((rows, columns), torch.float16)
    for argument, step in (("x_ptr", "stride_x"), ("out_ptr", "stride_out")):
        far = torch.empty(stride * (rows - 1) + columns, dtype=torch.float16, device="cuda")
        far = far.as_strided((rows, columns), (stride, 1))
        far.copy_(given[argument])
        given |= {argument: far, step: stride}
    subject.kernel[subject.grid(**given)](**given, ROWS=2, BLOCK=512, num_warps=4)
    assert wrong(name, given) == {}


def test_torch_compile_runs_remembered(monkeypatch):
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    timed = []
    bench = CachingAutotuner.benchmark_all_configs
    monkeypatch.setattr(
        CachingAutotuner,
        "benchmark_all_configs",
        lambda self, *a, **k: timed.append(a) or bench(self, *a, **k),
    )
    subject = SUBJECTS["softmax"]
    kernel = tritile.autotune(subject.configs, subject.key, reference=subject.reference)(subject.kernel)

    def softmax(x):
        given = {"x_ptr": x, "out_ptr": torch.empty_like(x), "rows": x.shape[0], "columns": x.shape[1]}
        given |= {"stride_x": x.stride(0), "stride_out": x.stride(0)}
        kernel[subject.grid(**given)](**given)
        return given["out_ptr"]  # nothing else that torch would compile, and time

    compiled = torch.compile(softmax, fullgraph=True, dynamic=False)
    x = torch.randn(64, 1009, device="cuda", dtype=torch.float16)
    told = pytest.warns(tritile.errors.UntunedWarning, match="outside of torch.compile")
    with tritile.mode("cached"), told:
        untuned = compiled(x)
    with tritile.mode("tune"):
        softmax(x)
    torch.compiler.reset()
    with tritile.mode("strict"):
        tuned = compiled(x)
    assert timed == []
    for got in (untuned, tuned):
        torch.testing.assert_close(got, x.softmax(-1), rtol=2e-3, atol=1e-5)


def test_own_product_searched_and_remembered():
    m, n, k = 1000, 520, 600
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    call = matmul_call(a, b, out, "ieee")
    (step,) = FAMILY.work(call, FAMILY.configs[0]).steps
    decided = {*dict(FAMILY.configs[0].kwargs), "MASK_M", "MASK_N", "MASK_K"}
    buffers = dict(zip(call.buffers, call.tensors, strict=True))
    given = {name: _bound(v, buffers) for name, v in step.args.items() if name not in decided}

    def grid(meta):
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]), 1, 1)

    kernel = kernels.tuned()
    with tritile.mode("tune"):
        kernel[grid](**given)
    assert torch.allclose(out, a @ b, rtol=1e-2, atol=1e-2)
    assert len(kernel.configs_timings) > 1
    again = kernels.tuned()  # as in another process
    out.fill_(float("nan"))
    with tritile.mode("strict"):  # in which nothing is measured
        again[grid](**given)
    assert torch.allclose(out, a @ b, rtol=1e-2, atol=1e-2)
    assert again.best_config in kernel.configs_timings


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("", ""),
        ("reads and drops", "wrong answer: out[192]"),
        ("destroys", "y is changed"),
        ("leaves out", "out[199] is never written"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_check_finds_strays(fault, reason, dtype):
    """In a process of its own, where guards alone show it."""
    with torch.device("cuda"), warnings.catch_warnings():
        warnings.simplefilter("error", IsolationWarning)
        found = outcome_of(fault, dtype)
    assert found.outcome == ("wrong" if fault else "right"), found.reason
    assert reason in found.reason
