"""torch's own products under `tritile.batch_invariant(torch=True)`: which tritile makes, where and when.

The kernels are registered for the CPU here, where tritile computes products row by row.
"""

import asyncio
import contextlib
import contextvars
import gc
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tritile
from tritile.core import settings
from tritile.core.settings import is_batch_invariant_torch, rules
from tritile.core.torch_private import WithoutGraphCache
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.invariant import overrides
from tritile.ops import reference

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.HostWarning")
A, B = torch.randn(12, 40), torch.randn(40, 24)
BATCH, MATRICES = torch.randn(3, 4, 40), torch.randn(3, 40, 24)
BIAS, VECTOR = torch.randn(24), torch.randn(40)


@pytest.fixture(scope="module", autouse=True)
def _on_the_host():
    overrides.install("CPU")
    yield
    overrides._LIBRARIES.pop("CPU")._destroy()


@pytest.fixture
def made(monkeypatch):
    """The products that tritile made, with their numbers of rows."""
    found, product = [], reference.product

    def counted(a, b, out, **more):
        found.append(a.shape[0] if a.ndim else 1)
        return product(a, b, out, **more)

    monkeypatch.setattr(reference, "product", counted)
    return found


def inside():
    return tritile.batch_invariant(torch=True)


async def outside_and_in_tasks(count):
    """What `count` returns outside, and in two tasks of this thread that are inside and outside meanwhile."""

    async def waits(choose, ready, go):
        with tritile.batch_invariant(choose, torch=choose):
            ready.set()
            await go.wait()
            return count()

    ready, go = [asyncio.Event(), asyncio.Event()], asyncio.Event()
    tasks = [asyncio.create_task(waits(*each, go)) for each in zip((True, False), ready, strict=True)]
    for each in ready:
        await each.wait()
    go.set()
    return [count(), *await asyncio.gather(*tasks)]


CALLS = {
    "mm": lambda: torch.mm(A, B),
    "bmm": lambda: torch.bmm(BATCH, MATRICES),
    "addmm": lambda: torch.addmm(BIAS, A, B, beta=0.5, alpha=2),
    "baddbmm": lambda: torch.baddbmm(BIAS, BATCH, MATRICES, alpha=3),
    "addbmm": lambda: torch.addbmm(BIAS, BATCH, MATRICES, beta=2),
    "mv": lambda: torch.mv(A, VECTOR),
    "addmv": lambda: torch.addmv(A[:, 0], A, VECTOR, beta=2, alpha=0.5),
    "addmv of a number": lambda: torch.addmv(torch.tensor(3.0), A, VECTOR),
    "dot": lambda: torch.dot(VECTOR, A[0]),
    "vdot": lambda: torch.vdot(VECTOR, A[0]),
    "activation": lambda: torch._addmm_activation(BIAS, A, B, use_gelu=True),
    "linear": lambda: F.linear(BATCH, B.mT, BIAS),
    "matmul": lambda: torch.matmul(BATCH, B),
    "einsum": lambda: torch.einsum("bmk,kn->bnm", BATCH, B),
    "tensordot": lambda: torch.tensordot(BATCH, B, dims=1),
    "half": lambda: torch.mm(A.half(), B.half()),
    "strided": lambda: torch.mm(B.mT[::2], A.mT[:, ::3]),
    "empty": lambda: torch.mm(A[:0], B),
    "no terms": lambda: torch.addmm(BIAS, A[:, :0], B[:0]),
    "out": lambda: torch.mm(A, B, out=torch.empty(12, 24)),
    "out of another shape": lambda: torch.addmm(BIAS, A, B, out=torch.empty(0)),
    "in place": lambda: torch.ones(12, 24).addmm_(A, B, alpha=2),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_torchs_products_are_made_here(name, grad, made):
    with grad():
        wanted = CALLS[name]()
        assert not made
        with inside():
            found = CALLS[name]()
        assert made or name in ("empty", "no terms")
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
        made.clear()
        assert torch.equal(CALLS[name](), wanted)
        assert not made


def test_rows_of_any_batch_are_alike():
    x, w = torch.randn(64, 300), torch.randn(300, 7)
    with inside():
        whole = x @ w
        for start, count in ((0, 1), (0, 7), (5, 2), (63, 1)):
            assert torch.equal(x[start : start + count] @ w, whole[start : start + count])
        assert torch.equal(torch.mv(x, w[:, 3]), whole[:, 3])


def test_out_may_be_an_operand():
    """Of which torch's own kernels say nothing, and make zeros on the CPU."""
    c = B.mT @ B
    with inside():
        wanted = torch.mm(c, c)
        assert torch.equal(torch.mm(c, c, out=c), wanted)


REFUSED = {
    "mixed": lambda: torch.addmm(BIAS, A.half(), B.half()),
    "mixed in place": lambda: torch.ones(12, 24).addmm_(A.half(), B.half()),
    "batches": lambda: torch.addbmm(BIAS, torch.randn(3, 4, 8), torch.randn(6, 4, 24)),
    "shape in place": lambda: torch.ones(5, 24).addmm_(A, B),
    "shapes": lambda: torch.mm(A, A),
    "dtypes": lambda: torch.mm(A, B.double()),
    "vector": lambda: torch.mv(A, B),
    "out's dtype": lambda: torch.mm(A, B, out=torch.empty(12, 24, dtype=torch.float64)),
    "leaf": lambda: torch.ones(12, 24, requires_grad=True).addmm_(A, B),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_torchs(name):
    def told():
        with pytest.raises(RuntimeError) as caught:
            REFUSED[name]()
        return str(caught.value)

    outside = told()
    with inside():
        assert told() == outside


@pytest.mark.parametrize("name", ["complex", "integers", "sparse"])
def test_what_is_not_covered_is_torchs_and_reported(name, made):
    kinds = {
        "complex": A.to(torch.complex64),
        "integers": A.long(),
        "sparse": A.to_sparse(),
    }
    other = B.to(kinds[name].dtype)
    with tritile.batch_invariant.report() as found:
        torch.mm(kinds[name], other)
    assert not made
    calls = [(each.name, each.calls) for each in found.operations]
    assert calls == ([] if name == "integers" else [("aten::mm", 1)])  # integers are exact in any order


class Labelled(torch.nn.Parameter):
    """A subclass that handles no operators, as servers have for their weights."""


def test_subclasses_are_covered(made):
    layer = torch.nn.Linear(40, 24)
    layer.weight, layer.bias = Labelled(layer.weight.data), Labelled(layer.bias.data)
    with inside():
        layer(A)
        A.as_subclass(type("Plain", (torch.Tensor,), {})) @ B
    assert len(made) == 2


def test_compiled_methods_of_tensors_written_in_python():
    call = torch.compile(lambda x: x.unflatten(1, (2, 3, 4)) + 1, backend="eager", fullgraph=True)
    with inside():
        assert torch.equal(call(B), B.unflatten(1, (2, 3, 4)) + 1)


def test_compiled_autograd(made):
    x, compile_backward = A.clone().requires_grad_(), torch.compile(backend="aot_eager")
    with inside():
        y = x @ B
    made.clear()
    with torch._dynamo.compiled_autograd._enable(compile_backward):
        y.sum().backward()
    assert made
    torch.testing.assert_close(x.grad, torch.ones(12, 24) @ B.mT, rtol=1e-4, atol=1e-4)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(40, 24), torch.nn.Linear(24, 8, bias=False)

    def forward(self, x):
        y = self.down(F.silu(self.up(x)))
        return torch.einsum("bsd,btd->bst", y, y)


def gradients(net, result):
    net.zero_grad()
    result.sum().backward()
    return [each.grad.clone() for each in net.parameters()]


def test_a_backward_pass_follows_its_forward_pass(made):
    net = Net()
    outside = net(BATCH)
    with inside():
        y = net(BATCH)
        assert len(made) == 3
        made.clear()
        gradients(net, outside)  # begins inside
        by_torch = len(made)
    made.clear()
    found = gradients(net, y)
    assert len(made) == 5 == by_torch
    torch.testing.assert_close(found, gradients(net, net(BATCH)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_inside(made, reentrant):
    net, x = Net(), BATCH.clone().requires_grad_()
    with inside():
        y = checkpoint(net, x, use_reentrant=reentrant)
        assert len(made) == 3
        y.sum().backward()
    assert len(made) == 3 + 3 + 6


@pytest.mark.parametrize("first", ["inside", "outside"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs_are_kept_apart(made, backend, first):
    torch.compiler.reset()
    net = Net()
    net_compiled = torch.compile(net, backend=backend, fullgraph=True)
    with inside():
        wanted = net(BATCH)
    for is_inside in (first == "inside", first != "inside", first == "inside"):
        if is_inside:
            with inside():
                y = net_compiled(BATCH)
        else:
            y = net_compiled(BATCH)
        made.clear()
        if is_inside:
            with inside():
                net_compiled(BATCH)
            assert len(made) == 3
            torch.testing.assert_close(y, wanted, rtol=0, atol=0)
        else:
            net_compiled(BATCH)
            assert not made
        made.clear()
        gradients(net, y)  # outside, in either case
        assert len(made) == (5 if is_inside else 0)


CHOICES = {
    "torch's": inside,
    "ours": lambda: tritile.batch_invariant(torch=False),
    "off": lambda: tritile.batch_invariant(False),
}


@pytest.mark.parametrize("first", CHOICES)
def test_each_choice_has_graphs_of_its_own(made, first):
    """torch's compiler makes sums of a product with a vector, which cannot be redirected as they run."""
    torch.compiler.reset()
    call = torch.compile(lambda a, b: torch.mv(a, b), fullgraph=True)
    with CHOICES[first]():
        call(A, VECTOR)
    for name, choose in CHOICES.items():
        call(A, VECTOR)
        made.clear()
        with inside(), choose():
            call(A, VECTOR)
            call(A, VECTOR)
        assert bool(made) == (name == "torch's"), name


def test_compiled_in_a_copied_context():
    torch.compiler.reset()
    call = torch.compile(lambda a, b: a @ b)
    with inside():
        copied = contextvars.copy_context()
    with pytest.raises(Exception, match="copied context"):
        copied.run(call, A, B)
    torch.testing.assert_close(call(A, B), A @ B)


def test_compiled_calls_of_threads_and_tasks(made):
    """Each has the graph of its own choice, whoever else has entered."""
    torch.compiler.reset()
    call = torch.compile(lambda a, b: torch.mv(a, b), fullgraph=True)
    call(A, VECTOR)
    with inside():
        call(A, VECTOR)
        copied = contextvars.copy_context()

    def count():
        made.clear()
        call(A, VECTOR)
        return len(made)

    assert asyncio.run(outside_and_in_tasks(count)) == [0, 1, 0]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(copied.run, count).result() == 1
        with inside():
            assert pool.submit(count).result() == 0


def test_a_choice_within_what_is_traced_is_the_graphs_own(made):
    torch.compiler.reset()

    @torch._dynamo.allow_in_graph
    def within(a, b):
        with inside():
            return a @ b

    call = torch.compile(lambda a, b: within(a, b) + 1, backend="aot_eager")
    for _ in range(2):
        call(A, B)
        with inside():
            call(A, B)
    made.clear()
    call(A, B)
    assert len(made) == 1


def test_a_backward_pass_is_lowered_as_its_forward_pass_was(made):
    """Inductor lowers it when it first runs, and makes addmm of mm and add; its cache keeps what it made."""
    torch.compiler.reset()
    x, w = A.clone().requires_grad_(), B.clone().requires_grad_()
    call = torch.compile(lambda x, w: (x @ w).sin().sum() + (x * A).sin().sum())
    y = call(x, w)
    with inside():
        y.backward()
    y = call(x, w)
    made.clear()
    y.backward()
    assert not made


EARLIER = """
import torch, tritile
from tritile.invariant import overrides
from tritile.ops import reference

a, v, made, product = torch.randn(12, 40), torch.randn(40), [], reference.product
reference.product = lambda *args, **more: (made.append(1), product(*args, **more))
call = torch.compile(lambda a, v: torch.mv(a, v), fullgraph=True)
call(a, v)  # before anything is registered
overrides.install("CPU")
for inside in (True, False, True):
    made.clear()
    with tritile.batch_invariant(inside, torch=inside):
        call(a, v)
    print(len(made))
"""


def test_functions_that_were_compiled_before_the_first_entry():
    """torch has looked kernels up by then, and its graphs have no guard of the setting."""
    done = subprocess.run([sys.executable, "-c", EARLIER], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["1", "0", "1"], done.stderr


def test_graphs_of_tritiles_own_calls_stay_invariant(made, monkeypatch):
    """What torch records is an operator of its own, as a backward pass may run in another thread."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        from functorch.compile import make_boxed_func

        graphs.append(graph)
        return make_boxed_func(graph.forward)

    from torch._dynamo.backends.common import aot_autograd

    call = torch.compile(lambda a, b: tritile.linear(a, b.mT), backend=aot_autograd(fw_compiler=backend))
    with tritile.batch_invariant():
        y = call(A.clone().requires_grad_(), B)
    y.sum().backward()
    names = [
        str(node.target) for graph in graphs for node in graph.graph.nodes if "tritile" in str(node.target)
    ]
    assert names == ["tritile.invariant_linear.default", "tritile.invariant_matmul.default"]


def test_transforms_and_autocast(made):
    with inside():
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(A, B.mT).dtype == torch.bfloat16
        torch.vmap(lambda x: x @ B)(BATCH)
        torch.func.grad(lambda w: (A @ w).sum())(B)
        torch.vmap(torch.func.grad(lambda w, x: (x @ w).sum()), (None, 0))(B, BATCH)
        torch.func.jvp(lambda w: A @ w, (B,), (B,))
        assert len(made) == 1 + 1 + 2 + 2 + 3
        with torch.autocast("cpu", torch.bfloat16):  # which casts neither of these
            assert torch.dot(VECTOR, VECTOR).dtype == torch.float32
            full = torch.zeros(12, 24).addmm_(A, B)
        assert torch.equal(full, torch.zeros(12, 24).addmm_(A, B))
        made.clear()
        torch.use_deterministic_algorithms(True)
        try:
            A @ B
        finally:
            torch.use_deterministic_algorithms(False)
    assert len(made) == 1


def test_nested_choices(made):
    def count():
        made.clear()
        torch.mm(A, B)
        return len(made)

    with inside():
        with tritile.batch_invariant():
            assert count() == 1, "None keeps the choice"
        with tritile.batch_invariant(torch=False):
            assert count() == 0
            with inside():
                assert count() == 1
        with tritile.batch_invariant(False):
            assert count() == 0
        with pytest.raises(ZeroDivisionError), inside():
            raise ZeroDivisionError
        assert count() == 1
    assert count() == 0
    with tritile.batch_invariant():
        assert count() == 0
    decorated = inside()(count)
    assert [decorated(), count(), decorated()] == [1, 0, 1]
    assert torch._functorch.config.enable_autograd_cache


def test_other_threads_and_tasks_keep_theirs(made):
    def count():
        before = len(made)
        torch.mm(A, B)
        return len(made) - before

    found = []
    with inside():
        thread = threading.Thread(target=lambda: found.append(count()))
        thread.start()
        thread.join()
        copied = contextvars.copy_context()

    assert (found, copied.run(count), count()) == ([0], 1, 0)
    assert asyncio.run(outside_and_in_tasks(count)) == [0, 1, 0]


def test_threads_enter_and_leave_together():
    """torch's cache of graphs is back once all have left, in whatever order."""
    barrier, faults = threading.Barrier(3), []

    def enter(number):
        try:
            for _ in range(20):
                barrier.wait(30)
                with inside():
                    a = torch.mm(A, B)
                    assert torch.equal(a[:1], torch.mm(A[:1], B)), number
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    gc.collect()
    assert (faults, WithoutGraphCache._count) == ([], 0)
    assert torch._functorch.config.enable_autograd_cache


def test_a_choice_of_torchs_cache_stays(monkeypatch):
    with torch._functorch.config.patch(enable_autograd_cache=False):
        with inside():
            assert not torch._functorch.config.enable_autograd_cache
        assert not torch._functorch.config.enable_autograd_cache
    with inside(), inside():
        assert not torch._functorch.config.enable_autograd_cache
    assert torch._functorch.config.enable_autograd_cache


def test_what_cannot_be_entered_chooses_nothing(monkeypatch):
    before = rules()

    def fail():
        raise UnsupportedError("no such torch")

    monkeypatch.setattr(overrides, "install", fail)
    with pytest.raises(UnsupportedError, match="no such torch"), inside():
        pass
    assert rules() == before
    assert not is_batch_invariant_torch()
    assert len(settings._of_thread.entered) == WithoutGraphCache._count == 0


def test_operators_of_graphs_that_another_process_made():
    """torch's caches name them, and so may a saved program, before anything is traced here."""
    code = "import torch, tritile.ops; assert torch.ops.tritile.invariant_matmul.default"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_one_context_of_many_threads(made):
    shared, barrier, faults = inside(), threading.Barrier(3), []

    def enter():
        try:
            for _ in range(20):
                barrier.wait(30)
                with shared:
                    torch.mm(A, B)
                assert not is_batch_invariant_torch()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=enter) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (faults, len(made)) == ([], 60)


def later_generator():
    yield A @ B


async def later_coroutine():
    return A @ B


@pytest.mark.parametrize("function", [later_generator, later_coroutine])
@pytest.mark.parametrize("choose", [inside, tritile.mode])
def test_functions_that_run_later_are_refused(function, choose):
    with pytest.raises(InvalidValueError, match=f"decorates {function.__name__}, which runs after"):
        (choose() if choose is inside else choose("off"))(function)


def test_tasks_that_leave_out_of_order(made):
    """A backward pass outside stays torch's."""
    w = B.clone().requires_grad_()

    async def task(before, within):
        await asyncio.sleep(before)
        with inside():
            await asyncio.sleep(within)

    async def both():
        await asyncio.gather(task(0, 0.02), task(0.01, 0.03))

    asyncio.run(both())
    torch.einsum("mk,kn->mn", A, w).sum().backward()
    assert not made
    assert not settings._of_thread.entered


@pytest.mark.parametrize("first", [0, 1])
def test_settings_that_are_left_out_of_order(made, first):
    """As generators that are closed, say: each takes back its own."""
    before = rules()
    entered = [inside(), tritile.mode("off")][:: 1 if first == 0 else -1]
    for each in entered:
        each.__enter__()
    entered[0].__exit__()
    torch.mm(A, B)
    assert len(made) == first
    assert (rules().mode == "off") == (first == 0)
    entered[1].__exit__()
    torch.mm(A, B)
    assert (len(made), rules(), is_batch_invariant_torch()) == (first, before, False)


def test_a_backward_pass_of_another_task_of_the_thread(made):
    w = B.clone().requires_grad_()

    async def waits(entered, done):
        with inside():
            entered.set()
            await done.wait()

    async def both():
        entered, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(waits(entered, done))
        await entered.wait()
        torch.mm(A, w).sum().backward()
        done.set()
        await task

    asyncio.run(both())
    assert not made


class Packed(torch.Tensor):
    """A weight that knows torch's mm alone."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            return torch.mm(args[0], args[1].held)
        raise NotImplementedError(str(func))


def test_weights_whose_class_knows_torchs_product(made):
    with inside():
        torch.mm(A, Packed(B))
    assert len(made) == 1


def test_products_are_views_where_torchs_are():
    outside = {name: call()._is_view() for name, call in CALLS.items()}
    with inside():
        assert {name: call()._is_view() for name, call in CALLS.items()} == outside


def test_two_libraries_override_one_operator(made):
    """The one that is there when ours is registered takes calls outside; one that comes later takes all."""
    calls = []
    later = torch.library.Library("aten", "IMPL")
    kernel = torch.library.get_kernel("aten::mm", "CPU")

    def theirs(keyset, *args):
        calls.append(1)
        return kernel.call_boxed(keyset, *args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        later.impl("mm", theirs, "CPU", with_keyset=True, allow_override=True)
    torch.mm(A, B)
    assert (len(calls), len(made)) == (1, 0)
    with inside():
        torch.mm(A, B)
    assert len(made) == 1, "a call that may record derivatives comes here before"
    later._destroy()
    calls.clear()
    with inside(), torch.inference_mode():
        torch.mm(A, B)
    assert (len(calls), len(made)) == (0, 2)


@pytest.mark.parametrize("given", [{"on": "yes"}, {"torch": 1}, {"on": None}])
def test_wrong_choices(given):
    with pytest.raises(InvalidValueError, match="expected True or False"):
        tritile.batch_invariant(**given)


@pytest.mark.parametrize("how", ["import", "run"])
def test_of_a_process_and_those_it_starts(how):
    code = (
        "import sys, torch; "
        + ("import tritile; " if how == "import" else "assert 'tritile' in sys.modules; ")
        + "from tritile.invariant import overrides; "
        "from tritile.core.settings import is_batch_invariant_torch; "
        "print(sorted(overrides.installed()), is_batch_invariant_torch()); "
        "import torch.compiler.config as config; print(config.cache_key_tag)"
    )
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    env = {name: value for name, value in os.environ.items() if name != "TRITILE_BATCH_INVARIANT"}
    command = [sys.executable, "-c", child]
    if how == "run":
        command = [sys.executable, "-m", "tritile", "run", "--kernels", "0", "--batch-invariant", *command]
    else:
        env |= {"TRITILE_BATCH_INVARIANT": "torch"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["['CUDA'] True", "tritile batch invariant"], done.stderr


@pytest.mark.parametrize(("value", "warns"), [("torhc", True), ("1", False), ("", False)])
def test_a_wrong_variable_is_told_on_import(value, warns):
    """A program that calls torch alone would not notice."""
    env = os.environ | {"TRITILE_BATCH_INVARIANT": value}
    done = subprocess.run([sys.executable, "-c", "import tritile"], env=env, capture_output=True, text=True)
    assert ("SettingWarning: TRITILE_BATCH_INVARIANT is 'torhc'" in done.stderr) == warns


# What was not invariant


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.norm = torch.nn.Linear(40, 48), torch.nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 1, 16).permute(2, 0, 3, 1, 4)
        return self.norm(F.scaled_dot_product_attention(q, k, v)).flatten(1)


def test_report_lists_what_ran():
    model = Attention()
    with tritile.batch_invariant.report() as found:
        y = model(BATCH)
        y.relu().cumsum(0)
        torch.randn(3).sort()
        torch.arange(9).sum()
        torch.cat([y, y]).view(-1)[:3].clone()
    names = [each.name for each in found.operations]
    assert [name for name in names if "attention" in name]
    assert {"aten::native_layer_norm", "aten::cumsum", "aten::randn", "aten::sort"} <= set(names)
    assert not {"aten::addmm", "aten::relu", "aten::sum", "aten::cat", "aten::clone"} & set(names)
    assert found
    assert found.invariant > 5
    assert str(found).startswith("not batch-invariant: ")
    with tritile.batch_invariant.report() as found:
        F.linear(A, B.mT, BIAS).sigmoid()
    assert (found.operations, bool(found)) == ([], False)
    assert str(found).startswith("all ")
    assert "<table>" in found._repr_html_()


def test_report_of_integers():
    numbers = torch.randint(9, (40, 12))
    with tritile.batch_invariant.report() as found:
        numbers.sum(0)
        numbers.sum(0, dtype=torch.float32)
        numbers.topk(3)
        numbers.flatten().bincount()
        numbers.cumsum(0)
    assert [each.name for each in found.operations] == ["aten::sum.dim_IntList", "aten::topk"]


def test_report_with_the_setting_off():
    with tritile.batch_invariant.report() as outer, tritile.batch_invariant.report() as inner:
        with tritile.batch_invariant(False):
            torch.mm(A, B)
        torch.mm(A.to(torch.complex64), B.to(torch.complex64))
    for found in (outer, inner):
        assert sum(each.calls for each in found.operations if each.name == "aten::mm") == 2


def test_report_of_inference_and_of_operators_that_take_functions():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 16, 16)
    with tritile.batch_invariant.report() as found, torch.inference_mode():
        F.linear(A, B.mT, BIAS)
        torch.einsum("mk,kn->mn", A, B)
    assert not found, found
    with tritile.batch_invariant.report() as found, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flex_attention(q, q, q)
        torch.compile(Net(), fullgraph=True)(BATCH)
    assert "flex_attention" in str(found)


def test_report_lists_backward_passes():
    x = A.clone().requires_grad_()
    with tritile.batch_invariant.report() as found:
        F.linear(x, B.mT, BIAS.clone().requires_grad_()).mean().backward()
    assert [each.name for each in found.operations] == ["aten::mean", "aten::sum.dim_IntList"]


# Comparing bits


def test_check_names_the_first_operation():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(40, 24), torch.nn.Linear(24, 8)

        def forward(self, x):
            h = self.first(x)
            return {"out": self.last(h / (1 + x.shape[0] * h.abs().mean(0))), "size": x.shape[0]}

    with inside():
        found = tritile.check_invariant(Net(), lambda rows: torch.randn(rows, 40), batches=(1, 3, 8))
        assert not found
        assert (found.operation, found.module, found.runs) == ("aten::mean.dim", "Net", 6)
        assert found.differing["3 rows"] == 3
        assert "aten::mean.dim in Net" in str(found)
        found = tritile.check_invariant(
            Attention(), lambda rows: (torch.randn(rows, 5, 40),), batches=(1, 2, 7)
        )
        assert (found.equal, found.differing, found.runs, found.operation) == (True, {}, 6, "")


def test_check_compares_what_corresponds():
    """Batches may run other operations: a copy of one row is none."""

    def copies(x):
        y = x.view(-1, 4, 8).transpose(0, 1).contiguous()
        return (y * 2 / (1 + y.shape[1])).transpose(0, 1).reshape(len(x), -1)

    found = tritile.check_invariant(copies, lambda rows: torch.randn(rows, 32), batches=(1, 3, 7))
    assert found.operation == "aten::div.Tensor"

    class Fails(torch.nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    class Catches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bad = Fails()

        def forward(self, x):
            with contextlib.suppress(ZeroDivisionError):
                self.bad(x)
            assert len(x) > 1, "needs two rows"
            return x - x.mean(0)

    found = tritile.check_invariant(Catches(), lambda rows: torch.randn(rows, 8), batches=(2, 4))
    assert (found.operation, found.module) == ("aten::mean.dim", "Catches")
    compiled = torch.compile(lambda x: x - x.mean(0), fullgraph=True)
    assert tritile.check_invariant(compiled, lambda rows: torch.randn(rows, 8)).operation == "aten::mean.dim"


def test_checksums_tell_bits_apart():
    """Of small differences that cancel, too."""

    def model(x):
        bits = torch.ones(len(x), 3)
        if len(x) != 64:
            bits.view(torch.int32).add_(torch.tensor([1, 1, -1], dtype=torch.int32))
        return bits

    assert not tritile.check_invariant(model, lambda rows: torch.zeros(rows, 3))


def test_check_refuses_results_that_are_not_plain():
    with pytest.raises(tritile.errors.UnsupportedError, match="sparse or nested"):
        tritile.check_invariant(torch.Tensor.to_sparse, lambda rows: torch.ones(rows, 3))


def test_check_takes_keywords_and_what_has_no_rows():
    table = torch.randn(9, 9)

    def model(*, x, weight):
        return x @ weight, weight

    with inside():
        assert tritile.check_invariant(model, lambda rows: {"x": torch.randn(rows, 9), "weight": table})


def test_check_of_what_differs_without_a_call():
    """As in a graph, or a kernel that torch does not see."""
    seen = []

    def model(x):
        seen.append(1)
        y = x.clone()
        y.numpy()[:] += len(seen)
        return y

    found = tritile.check_invariant(model, lambda rows: torch.zeros(rows, 2), batches=(1, 2))
    assert (found.equal, found.operation) == (False, "")
    assert "no single operation" in str(found)


@pytest.mark.parametrize("batches", [(), (1,), (0, 2), (2, 1.5)])
def test_check_refuses_batches(batches):
    with pytest.raises(InvalidValueError, match="numbers of rows"):
        tritile.check_invariant(torch.nn.ReLU(), lambda rows: torch.zeros(rows, 2), batches=batches)


@pytest.mark.parametrize(
    ("model", "make"),
    [
        (torch.nn.ReLU(), lambda rows: torch.zeros(rows + 1, 2)),
        (lambda x: x.sum(), lambda rows: torch.zeros(rows, 2)),
    ],
)
def test_check_refuses_models_without_rows(model, make):
    with pytest.raises(tritile.errors.ShapeError, match="first dimension"):
        tritile.check_invariant(model, make)
