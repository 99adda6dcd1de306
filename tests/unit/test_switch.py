"""torch's calls by tritile, in the interpreter: what is taken, what is left, and where a switch counts."""

import contextlib
import subprocess
import sys
import threading
import types

import pytest
import torch
import torch.nn.functional as F

import tritile
from tests.attention import assert_attention
from tests.overriding import in_threads, switch
from tests.reference import Sides, assert_fused, assert_product
from tritile.core import settings
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.in_torch import deciding, overrides, routes, state
from tritile.ops import memo
from tritile.planning.beside import Judgement

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.InterpreterWarning")


def f(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def everywhere(policy="always"):
    return tritile.use_in_torch.everywhere(policy, _keys=("CPU",))


def bits(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.reshape(-1).contiguous().tolist()


A, B, C, D = f(5, 7), f(7, 3, seed=1), f(5, 3, seed=2), f(3, seed=3)
AS, BS, CS = f(2, 5, 7), f(2, 7, 3, seed=1), f(2, 5, 3, seed=2)


@pytest.fixture(autouse=True, params=["python", "crossing"])
def _nothing_stays(request, monkeypatch):
    """A test leaves aten's operators as they were: with kernels in Python alone, and with those in C++."""
    if request.param == "crossing":
        built = request.getfixturevalue("crossing")
        monkeypatch.setattr(overrides.building, "library", lambda: built)
    before = [torch._C._dispatch_dump(f"aten::{name}") for name in ("mm", "addmm.out", "clone")]
    yield
    tritile.use_in_torch.nowhere()
    overrides.remove_unwanted()
    assert before == [torch._C._dispatch_dump(f"aten::{name}") for name in ("mm", "addmm.out", "clone")]
    assert state.active() is None
    assert not overrides._libraries


PRODUCTS = [
    ("mm", lambda: A @ B, A, B, Sides()),
    *(
        ("mm", lambda dtype=dtype: A.to(dtype) @ B.to(dtype), A.to(dtype), B.to(dtype), Sides())
        for dtype in (torch.float16, torch.bfloat16, torch.float64)
    ),
    ("mm", lambda: torch.mm(B.mT, A.mT), B.mT, A.mT, Sides()),
    ("mm", lambda: torch.mm(A, B, out=torch.empty(3, 5).mT), A, B, Sides()),
    ("mm", lambda: F.linear(AS, B.mT).view(10, 3), AS.view(10, 7), B, Sides()),
    ("bmm", lambda: torch.matmul(AS, BS), AS, BS, Sides()),
    ("bmm", lambda: torch.bmm(AS, BS, out=torch.empty(2, 5, 3)), AS, BS, Sides()),
    ("bmm", lambda: torch.einsum("bik,bkj->bij", AS, BS), AS, BS, Sides()),
    ("addmm", lambda: F.linear(A, B.mT, D), A, B, Sides(bias=D)),
    ("addmm", lambda: torch.addmm(C, A, B, beta=2, alpha=0.5), A, B, Sides(bias=C, beta=2, alpha=0.5)),
    ("addmm", lambda: torch.addmm(C, A, B, beta=0, out=torch.empty(5, 3)), A, B, Sides(bias=C, beta=0)),
    ("baddbmm", lambda: torch.baddbmm(CS, AS, BS, alpha=3), AS, BS, Sides(bias=CS, alpha=3)),
    ("baddbmm", lambda: torch.baddbmm(D, AS, BS, out=torch.empty(2, 5, 3)), AS, BS, Sides(bias=D)),
]


@pytest.mark.parametrize(("call", "run", "a", "b", "sides"), PRODUCTS)
def test_products_are_taken(call, run, a, b, sides):
    like = run()
    with switch() as report:
        got = run()
    assert [(row.call, row.taken, row.calls) for row in report.rows] == [(call, True, 1)]
    assert (got.shape, got.stride(), got.dtype) == (like.shape, like.stride(), like.dtype)
    assert_fused(got, a, b, sides)


X = f(2, 3, 4, 5)
COPIES = [
    lambda: X.permute(3, 0, 2, 1).contiguous(),
    lambda: X.mT.reshape(6, 20),
    lambda: X.contiguous(memory_format=torch.channels_last),
    lambda: X[:, 1:, ::2].clone(memory_format=torch.contiguous_format),
    lambda: X.to(torch.complex64).permute(3, 0, 2, 1).contiguous(),
    lambda: (X > 0).mT.flatten(),
    lambda: X[0, 0, 0, :1].expand(3, 4, 5).transpose(0, 2).contiguous(),
]


@pytest.mark.parametrize("run", COPIES)
def test_copies_are_taken(run):
    like = run()
    with switch() as report:
        got = run()
    assert [(row.call, row.taken, row.calls) for row in report.rows] == [("clone", True, 1)]
    assert bits(got) == bits(like)
    assert got.is_contiguous() == like.is_contiguous()


def overlapping():
    memory = torch.arange(40.0)
    a, out = memory[:12].view(3, 4), memory[8:17].view(3, 3)
    return torch.mm(a, a.mT.clone(), out=out)


LEFT = [
    ("int64 is not supported", lambda: (9 * A).long() @ (9 * B).long()),
    ("complex64 is not supported", lambda: A.to(torch.complex64) @ B.to(torch.complex64)),
    ("no elements", lambda: A[:0] @ B),
    ("no elements", lambda: torch.addmm(C, A[:, :0], B[:0])),
    ("alpha is 0: there is nothing to multiply", lambda: torch.addmm(C, A, B, alpha=0)),
    ("alpha is 0: there is nothing to multiply", lambda: torch.baddbmm(CS, AS, BS, beta=0, alpha=0.0)),
    ("out shares memory with an input", overlapping),
    ("out needs to be resized, or overlaps itself", lambda: torch.mm(A, B, out=torch.empty(0))),
    ("lazily negated or conjugated, or an unsupported memory format", lambda: neg(X).mT.contiguous()),
    ("the order of dimensions stays the same", lambda: X.clone(memory_format=torch.contiguous_format)),
]


def neg(x):
    return torch.view_as_complex(torch.stack((x, x), -1)).conj()


@pytest.mark.parametrize(("why", "run"), LEFT)
def test_what_is_left_is_torchs_own_bit_for_bit(why, run):
    like = run()
    with switch() as report:
        got = run()
    assert bits(got) == bits(like)
    assert [(row.taken, row.why) for row in report.rows] == [(False, why)]


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.mm(A, A),
        lambda: torch.mm(A, B.double()),
        lambda: torch.addmm(f(4), A, B),
        lambda: torch.mm(A, B, out=torch.empty(5, 3, dtype=torch.float64)),
    ],
)
def test_wrong_calls_raise_torchs_errors(run):
    with pytest.raises(RuntimeError) as wanted:
        run()
    with switch(), pytest.raises(RuntimeError) as got:
        run()
    assert str(got.value) == str(wanted.value)


def test_lazy_negation_and_strides_that_are_repeated():
    negative, repeated = torch._neg_view(A), A[:1].expand(5, 7)
    with switch() as report:
        first, second = negative @ B, repeated @ B
    assert report.taken == 2
    assert_product(first, -A, B)
    assert_product(second, repeated, B)


def test_what_lies_elsewhere_within_16_bytes_is_decided_apart(monkeypatch):
    """Kernels are compiled for addresses that are, or are not, whole 16 bytes."""
    decided, product = [], routes.decide_product
    monkeypatch.setattr(routes, "decide_product", lambda *given: decided.append(given) or product(*given))
    memory, out = f(128), torch.zeros(64)

    def at(memory, first, *shape):
        return memory[first : first + shape[0] * shape[1]].view(shape)

    for firsts in ((0, 0, 0), (4, 4, 4), (1, 0, 0), (0, 2, 0), (0, 0, 3), (5, 8, 0)):
        a, b = at(memory, firsts[0], 5, 7), at(memory, 64 + firsts[1], 7, 2)
        with switch():
            got = torch.mm(a, b, out=at(out, firsts[2], 5, 2))
        assert_product(got, a, b)
    assert len(decided) == 4


def test_a_subclass_is_as_its_memory_unless_it_says_what_operations_do():
    class Own(torch.Tensor):
        pass

    class Teller(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("not asked where dispatch is off")

    own, told = A.as_subclass(Own), A.as_subclass(Teller)
    with switch() as report:
        got = own @ B
        with torch._C._DisableTorchDispatch():
            left = told @ B
    assert type(got) is Own
    assert_product(got.as_subclass(torch.Tensor), A, B)
    assert torch.equal(left.as_subclass(torch.Tensor), A @ B)
    assert [row.why for row in report.rows] == [
        "policy always",
        "a subclass of torch.Tensor with a __torch_dispatch__ of its own",
    ]


def test_a_clone_that_keeps_its_order_is_not_looked_at():
    with switch() as report:
        assert torch.equal(X.mT.clone(), X.mT)
    assert report.taken + report.left == 0


def test_what_is_expected_leaves_host_memory():
    rows, square = f(routes.FEW_ROWS + 1, 7), f(300, 300)
    assert square.nbytes > routes.LITTLE
    like = rows @ B, square.mT.contiguous()
    with switch("expected") as report:
        got = rows @ B, square.mT.contiguous()
    assert all(map(torch.equal, got, like))
    assert {row.why for row in report.rows} == {"in host memory, where kernels are interpreted"}
    assert report.left == 2


def test_an_overwritten_out_is_not_used_for_a_gradient():
    weight, out = f(5, 3).requires_grad_(), torch.ones(5, 3)
    loss = (weight * out).sum()
    with switch():
        torch.mm(A, B, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_both_orders_and_tangents():
    tensors = [t[:2, :2].double().clone().requires_grad_() for t in (A, B, C)]
    a, b, _ = tensors
    with switch() as report:
        added = lambda a, b, c: torch.addmm(c, a, b.mT.contiguous())  # noqa: E731
        torch.autograd.gradcheck(added, tensors, fast_mode=True)
        torch.autograd.gradgradcheck(torch.mm, (a[:1], b), fast_mode=True)
        _, tangent = torch.func.jvp(torch.mm, (A, B), (2 * A, B))
        batched = torch.vmap(lambda x: x @ B)(AS)
    assert {row.call for row in report.rows if row.taken} == {"mm", "addmm", "bmm", "clone"} - {"bmm"}
    assert report.left == 0
    assert_fused(tangent, A, B, Sides(alpha=3))
    assert_product(batched, AS, B)


def test_linear_and_its_backward_pass():
    layer, x, up = torch.nn.Linear(7, 3), A.clone().requires_grad_(), C
    with switch() as report:
        y = layer(x)
        y.backward(up)
    assert report.taken == 3
    weight, bias = layer.weight.detach(), layer.bias.detach()
    assert_fused(y.detach(), A, weight.mT, Sides(bias=bias))
    assert_product(x.grad, up, weight)
    assert_product(layer.weight.grad, up.mT, A)


def test_attention_and_its_backward_pass():
    assert_attention(switch())


def test_switches_nest_and_the_innermost_decides():
    with switch() as outer:
        A @ B
        with switch("never") as off:
            A @ B
            with switch("expected") as inner:
                A @ B
        A @ B
    assert [(r.taken, r.left) for r in (outer, off, inner)] == [(2, 0), (0, 0), (0, 1)]


def test_a_switch_counts_for_its_thread():
    with switch() as report:
        (like,) = in_threads(lambda: A @ B)
        assert report.taken == 0
        in_threads(lambda: switch().__enter__())  # never left, in a thread that is gone
        A @ B
    assert report.taken == 1
    overrides.uninstall(("CPU",))
    assert torch.equal(like, A @ B)


def test_everywhere_counts_for_all_threads_until_nowhere():
    first = everywhere()
    in_threads(lambda: A @ B)
    with switch("never"):
        A @ B
    second = everywhere("expected")
    A @ B
    tritile.use_in_torch.nowhere()
    tritile.use_in_torch.nowhere()
    A @ B
    assert [(r.taken, r.left) for r in (first, second)] == [(1, 0), (0, 1)]


class Deep(torch.autograd.Function):
    """A backward pass within a backward pass: torch gives those that lie deep threads of their own."""

    @staticmethod
    def forward(ctx, x, depth, seen, act=lambda: A @ B):
        ctx.depth, ctx.seen, ctx.act = depth, seen, act
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                Deep.apply(inner, ctx.depth - 1, ctx.seen, ctx.act).backward()
        else:
            ctx.act()
            ctx.seen.append(threading.get_ident())
        return gradient, None, None, None


def test_the_threads_of_a_backward_pass_are_under_the_switch():
    x, seen = torch.ones(1, requires_grad=True), []
    with switch() as report:
        Deep.apply(x, 70, seen).backward()
    assert seen != [threading.get_ident()]
    assert report.taken == 1
    Deep.apply(x, 70, seen).backward()
    assert report.taken == 1


@pytest.fixture
def decided(monkeypatch):
    """The rules by which each product was decided in Python, and whether in a thread of autograd's."""
    found, mains, product = [], set(), routes.product

    def noted(*args):
        found.append((threading.get_ident() not in mains, settings.rules()))
        return product(*args)

    monkeypatch.setattr(routes, "product", noted)
    return found, mains


def backward_in_other_threads(act=lambda: A @ B):
    x = torch.ones(1, requires_grad=True)
    Deep.apply(x, 70, [], act).backward()


def test_backward_threads_go_by_the_mode_that_the_switch_was_turned_on_in(decided):
    found, mains = decided
    mains.add(threading.get_ident())
    with tritile.mode("strict"), tritile.batch_invariant(), switch():
        A @ B
        backward_in_other_threads()
        with tritile.mode("off"):
            A @ B
            backward_in_other_threads()
    strict = ("strict", True)
    assert found == [(False, strict), (True, strict), (False, ("off", True)), (True, strict)]


def test_a_mode_that_a_backward_function_chooses_goes_first(decided):
    def act():
        with tritile.mode("off"):
            A @ B

    with tritile.mode("strict"), tritile.batch_invariant(), switch():
        backward_in_other_threads(act)
    assert [rules for _, rules in decided[0]] == [("off", True)]


def test_a_switch_that_outlives_its_mode_keeps_it_for_backward_threads_alone(decided):
    own = switch()
    with tritile.mode("strict"):
        own.__enter__()
    entry = state.active()
    assert entry.chosen is not None  # so C++ decides nothing
    A @ B
    backward_in_other_threads()
    assert [rules.mode for _, rules in decided[0]] == ["cached", "strict"]
    own.__exit__(None, None, None)
    assert entry.chosen is None


def test_two_threads_carry_their_own_modes(decided):
    both = threading.Barrier(2)

    def step(name, size):
        with tritile.mode(name), switch():
            both.wait(60)
            backward_in_other_threads(lambda: (f(size, 7) @ B, both.wait(60)))

    in_threads(lambda: step("strict", 3), lambda: step("off", 4))
    assert sorted(rules.mode for _, rules in decided[0]) == ["off", "strict"]


def test_exceptions_end_it_and_switches_may_end_in_any_order():
    with pytest.raises(ZeroDivisionError), switch():
        _ = 1 / 0
    assert state.active() is None
    first, second = switch(), switch()
    one = first.__enter__()
    two = second.__enter__()
    first.__exit__(None, None, None)
    A @ B
    second.__exit__(None, None, None)
    A @ B
    assert (one.taken, two.taken) == (0, 1)


def test_one_switch_may_be_entered_again_and_again():
    own = switch()
    with own, own:
        A @ B
    with own:
        A @ B
    assert own.report.taken == 2


def test_one_switch_may_be_on_in_several_threads():
    own = switch()
    own.__enter__()
    entered, go_on = threading.Event(), threading.Event()

    def other():
        with own:
            entered.set()
            go_on.wait(60)
            A @ B

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(60)
    own.__exit__(None, None, None)
    A @ B
    go_on.set()
    thread.join()
    assert own.report.taken == 1


def test_decorators_of_functions_and_generators():
    own = switch()

    @own
    def product():
        return A @ B

    @own
    def products():
        for _ in range(2):
            yield A @ B

    product()
    for _ in products():
        assert state.active() is None
        A @ B
    assert own.report.taken == 3
    with contextlib.closing(products()) as abandoned:
        next(abandoned)
    assert own.report.taken == 4

    async def coroutine():
        pass

    with pytest.raises(InvalidValueError, match="coroutine"):
        own(coroutine)


@pytest.mark.parametrize("turn_on", [tritile.use_in_torch, everywhere])
def test_a_wrong_policy_is_told_of(turn_on):
    with pytest.raises(InvalidValueError, match=r"'sometimes'.*expected, always, never"):
        turn_on("sometimes")


def test_no_mode_is_a_reason_to_fail(monkeypatch):
    monkeypatch.setenv("TRITILE_MODE", "bogus")
    with switch(), pytest.raises(InvalidValueError, match="bogus"):
        A @ B


def test_reports_tell_calls_reasons_and_problems():
    with switch() as report:
        for _ in range(3):
            A @ B
        A[:0] @ B
        F.linear(A, B.mT, D)
    assert repr(report).splitlines() == [
        "tritile in torch: 4 calls handled, 1 passed through",
        "  mm     handled         3  policy always",
        "  addmm  handled         1  policy always",
        "  mm     passed through  1  no elements",
    ]
    assert [tuple(row) for row in report.problems["5x3x7 NN float32 ieee"]] == [
        ("mm", True, "policy always", 3)
    ]
    html = report._repr_html_()
    assert "4 calls handled, 1 passed through" in html
    assert html.count("<tr>") == 4


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_functions(inside):
    own = switch()

    def plain(a, b):
        return torch.relu(a @ b)

    def switched(a, b):
        with own:
            c = a @ b
        return torch.relu(c)

    run = torch.compile(switched if inside else plain, backend="aot_eager")
    with contextlib.nullcontext() if inside else own:
        got = [run(A, B), run(A, B)]
    assert own.report.taken == 2
    with own:
        wanted = plain(A, B)
    assert torch.equal(got[0], wanted)
    assert torch.equal(got[1], wanted)
    torch._dynamo.reset()


def test_kernels_are_not_compiled_themselves():
    def frames():
        """How many pieces are compiled where a call is between two compiled ones."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        between = torch._dynamo.disable(lambda x: x @ B, recursive=False)
        torch.compile(lambda x: torch.relu(between(x + 1)), backend="eager")(A)
        return torch._dynamo.utils.counters["frames"]["total"]

    like = frames()
    with switch() as report:
        assert frames() == like
    assert report.taken == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("_nothing_stays", ["python"], indirect=True)
def test_the_first_use_warns_of_nothing_and_imports_no_compiler():
    code = (
        "import sys, warnings, torch, tritile\n"
        "warnings.simplefilter('error')\n"
        "with tritile.use_in_torch('expected', _keys=('CPU', 'CUDA')) as report:\n"
        "    torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "print(report.left, 'torch._dynamo' in sys.modules, torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.split() == ["1", "False", "False"]


@pytest.fixture
def launched(monkeypatch):
    """Stands for a GPU: what is taken is prepared once for all calls alike, and each launch is noted."""
    prepared, launches = [], []

    def prepare(call):
        prepared.append(call)
        return types.SimpleNamespace(at=launches.append)

    def fresh(shape, strides, dtype, device):
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    monkeypatch.setattr(deciding, "on_host", lambda tensor: False)
    monkeypatch.setattr(deciding, "prepared", prepare)
    monkeypatch.setattr(memo, "new_output", fresh)
    monkeypatch.setattr(deciding, "Launch", types.SimpleNamespace)
    routes._memo.clear()  # of what other tests decided
    yield prepared, launches
    routes._memo.clear()


def pointers(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def test_calls_alike_are_prepared_once_and_launched_with_their_own_tensors(launched):
    prepared, launches = launched
    others = A.clone(), B.clone(), C.clone()
    with switch() as report:
        first, second = torch.addmm(C, A, B, alpha=2), torch.addmm(others[2], others[0], others[1], alpha=2)
    assert [len(prepared), len(launches), report.taken] == [1, 2, 2]
    assert list(launches[0]) == pointers((A, B, first, C))
    assert list(launches[1]) == pointers((others[0], others[1], second, others[2]))


def test_results_that_lie_column_by_column_are_launched_turned(launched):
    out = torch.empty(3, 5).mT
    with switch():
        torch.mm(A, B, out=out)
    assert list(launched[1][0]) == pointers((B, A, out))


def test_copies_are_launched_from_where_they_lie_to_where_they_go(launched):
    with switch() as report:
        got = [X.contiguous(memory_format=torch.channels_last) for _ in range(2)]
    assert [len(launched[0]), report.taken] == [1, 2]
    assert list(launched[1][1]) == pointers((X, got[1]))
    assert got[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.addmm(C, A, B),
        lambda: torch.addmm(C, A, B, alpha=2),
        lambda: torch.addmm(C, A, B, beta=0.0),
        lambda: torch.addmm(D, A, B),
        lambda: torch.addmm(C, f(6, 8)[1:, 1:], B),
        lambda: torch.addmm(C, A, B, out=torch.empty(5, 3)),
    ],
)
def test_calls_that_differ_are_prepared_apart(launched, run):
    with switch():
        torch.addmm(C, A, B, alpha=1.5)
        run()
    assert len(launched[0]) == 2


def test_a_problem_that_nothing_runs_is_left(launched, monkeypatch):
    def fail(call):
        raise UnsupportedError("no config runs it")

    monkeypatch.setattr(deciding, "prepared", fail)
    with switch() as report:
        got = A @ B
    assert torch.equal(got, A @ B)
    assert [row.why for row in report.rows] == ["UnsupportedError: no config runs it"]


def test_what_is_short_is_taken_in_a_capture_or_without_python(launched, monkeypatch):
    monkeypatch.setattr(deciding, "_judged", lambda policy, call: Judgement(True, "short", captured=True))
    call = routes.describe_product((A, B), (1, 1), torch.empty(5, 3), "ieee")
    for capturing in (False, True):
        monkeypatch.setattr(deciding, "capturing", lambda capturing=capturing: capturing)
        for quick in (False, True):
            verdict = deciding._decide("mm", "expected", "", "", quick, lambda: (call, lambda: None)).verdict
            assert verdict.taken == (capturing or quick)


def test_forgetting_decides_anew(launched):
    with switch():
        A @ B
        tritile.forget()
        A @ B
    assert len(launched[0]) == 2


def test_little_is_left_at_a_glance_but_where_captured(monkeypatch):
    def on_gpu(*shape):
        count = torch.Size(shape).numel()
        return types.SimpleNamespace(
            shape=shape, ndim=len(shape), numel=lambda: count, nbytes=2 * count, is_cuda=True
        )

    entry, weight = state.Entry("expected"), on_gpu(4096, 4096)
    monkeypatch.setattr(routes, "capturing", lambda: False)
    assert routes.brief_product("mm", entry, (on_gpu(16, 4096), weight))
    assert routes.brief_product("addmm", entry, (on_gpu(4096), on_gpu(1, 4096), weight))
    assert routes.brief_copy(entry, on_gpu(8, 512))
    assert (entry.report.left, entry.report.taken) == (3, 0)
    assert not routes.brief_product("mm", entry, (on_gpu(17, 4096), weight))
    assert not routes.brief_product("mm", entry, (on_gpu(16, 4097), on_gpu(4097, 4096)))
    assert not routes.brief_product("mm", entry, (on_gpu(4096), weight))  # which torch refuses itself
    assert not routes.brief_copy(entry, on_gpu(1024, 1024))
    assert not routes.brief_product("mm", state.Entry("always"), (on_gpu(16, 4096), weight))
    monkeypatch.setattr(routes, "capturing", lambda: True)
    assert not routes.brief_product("mm", entry, (on_gpu(16, 4096), weight))
    assert not routes.brief_copy(entry, on_gpu(8, 512))
    assert entry.report.left == 3
