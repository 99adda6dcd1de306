"""Interpreted twins of kernels, and digests, follow what a kernel calls, wherever it is named."""

import contextlib
import multiprocessing
import threading
import warnings

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.unit import helpers_for_kernels as helpers
from tritile.core import threads
from tritile.core.of_triton import LANGUAGE_PATCHER, interpreter_builder
from tritile.core.threads import library_lock
from tritile.errors import InterpreterWarning
from tritile.families.common.work import Kernel
from tritile.runtime import interpreter as interpreter_module
from tritile.runtime.interpreter import interpret


@triton.jit
def doubled(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, helpers.twice(tl.load(x_ptr + i, mask=i < n)), mask=i < n)


def closed_over(inner):
    @triton.jit
    def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(y_ptr + i, inner(tl.load(x_ptr + i, mask=i < n)), mask=i < n)

    return kernel


@triton.jit
def thrice(x):
    return x + x + x


def result(kernel):
    x, y = torch.arange(5.0), torch.zeros(5)
    interpret(kernel, (1,), (x, y, 5), {"BLOCK": 8})
    return y.tolist()


def test_helpers_in_another_module_and_in_closures():
    assert result(doubled) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert result(closed_over(thrice)) == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert result(closed_over(helpers.twice)) == [0.0, 2.0, 4.0, 6.0, 8.0]


FORK = multiprocessing.get_context("fork")
OWNERS = (*interpreter_module._PATCHED, interpreter_module.InterpreterBuilder, tl.block_type)


def standing():
    """All that is patched while a kernel is interpreted."""
    return [getattr(*LANGUAGE_PATCHER), interpreter_builder.options, *(dict(vars(owner)) for owner in OWNERS)]


def test_the_library_is_left_as_it_was():
    before = standing()
    interpreter_module._changed_language()
    assert standing() == before
    result(doubled)
    assert standing() == before
    assert not hasattr(tl.cdiv.fn, "tritile_twin")
    assert tl.core.is_builtin(tl.load)
    assert interpreter_builder.options.sanitize_overflow


@triton.jit
def cdivs(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + tl.cdiv(n, 2), mask=i < n)


@triton.jit
def seven(a, b):
    return 7


def test_what_replaces_a_function_of_the_library_is_interpreted(monkeypatch):
    assert result(cdivs)[0] == 3.0
    monkeypatch.setattr(tl, "cdiv", seven)
    assert result(cdivs)[0] == 7.0
    monkeypatch.undo()
    assert result(cdivs)[0] == 3.0


@contextlib.contextmanager
def another_thread(work):
    """Within, another thread is amid `work(wait)`, where `wait` is."""
    there, go_on = threading.Event(), threading.Event()

    def wait(*_):
        there.set()
        go_on.wait()
        return (1,)

    thread = threading.Thread(target=work, args=(wait,))
    thread.start()
    try:
        there.wait()
        yield
    finally:
        go_on.set()
        thread.join()


def exit_code(child):
    process = FORK.Process(target=child, daemon=True)
    process.start()
    process.join()
    return process.exitcode


def interpreting(wait):
    x, y = torch.arange(5.0), torch.zeros(5)
    interpret(doubled, wait, (x, y, 5), {"BLOCK": 8}, in_order=True)  # a grid is asked for amid all patches


def compiling(wait):
    with library_lock:
        wait()


def test_a_kernel_is_imported_when_no_other_thread_has_the_language_patched():
    """Gluon keeps what it finds in triton.language as it is imported."""
    kernel, found = Kernel(helpers.__name__, "twice"), []
    thread = threading.Thread(target=lambda: found.append(kernel.jitted))
    with another_thread(interpreting):
        thread.start()
        thread.join(0.1)
        assert found == []
    thread.join()
    assert found == [helpers.twice]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("work", [interpreting, compiling])
def test_a_child_forked_meanwhile_has_a_free_lock_and_the_library_as_it_was(work, monkeypatch):
    monkeypatch.setattr(threads, "WAIT_S", 0.01)
    before = standing()

    def child():
        assert library_lock.acquire(timeout=0)
        library_lock.release()
        assert standing() == before
        assert result(doubled) == [0.0, 2.0, 4.0, 6.0, 8.0]
        assert standing() == before

    with another_thread(work):
        assert (standing() == before) is (work is compiling)
        assert exit_code(child) == 0
    assert standing() == before
    assert result(doubled) == [0.0, 2.0, 4.0, 6.0, 8.0]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_makes_anew_the_twins_that_were_being_made(monkeypatch):
    monkeypatch.setattr(threads, "WAIT_S", 0.01)
    kernel = closed_over(thrice)
    named_values = interpreter_module.named_values

    def child():
        monkeypatch.setattr(interpreter_module, "named_values", named_values)
        assert result(kernel) == [0.0, 3.0, 6.0, 9.0, 12.0]

    def work(wait):
        monkeypatch.setattr(interpreter_module, "named_values", lambda fn: wait() and named_values(fn))
        with library_lock:
            interpreter_module.interpreted(kernel)

    with another_thread(work):
        assert exit_code(child) == 0
    monkeypatch.setattr(interpreter_module, "named_values", named_values)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_waits_for_what_ends_soon(monkeypatch):
    monkeypatch.setattr(threads, "WAIT_S", 60.0)
    there, ended = threading.Event(), []

    def work():
        with library_lock:
            there.set()
            threading.Event().wait(0.1)
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    there.wait()
    assert exit_code(lambda: None if ended else exit(1)) == 0
    thread.join()
    assert library_lock.acquire(timeout=0)
    library_lock.release()


@pytest.mark.filterwarnings("ignore::tritile.errors.InterpreterWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numpy_warns_of_nothing(dtype):
    a = torch.full((3, 40), torch.finfo(dtype).max, dtype=dtype)
    a[1, 0], a[2] = torch.inf, 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        made = tritile.matmul(a, a.mT.contiguous())
        tritile.linear(a, a, activation="gelu")
    assert torch.isinf(made[0, 0])
    assert torch.isnan(made[1, 2])


@triton.jit
def first_alone(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    start = n * tl.program_id(0)
    tl.store(y_ptr + start + i, tl.load(x_ptr + i, mask=i < n), mask=(i < n) & (start == 0))


def test_a_decorated_kernel_too_tells_once_that_it_is_interpreted():
    interpreter_module.warn_interpreted.cache_clear()
    kernel = tritile.autotune([triton.Config({"BLOCK": 16})], [])(first_alone)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kernel[(1,)](torch.ones(9), torch.ones(9), 9)
        kernel[(1,)](torch.ones(9), torch.ones(9), 9)
        tritile.transpose(torch.ones(2, 3))
    assert [(each.category, each.filename) for each in told] == [(InterpreterWarning, __file__)]


@pytest.mark.parametrize("grid", [[2], lambda named: [named["n"] - 3]])
def test_a_comparison_of_scalars_masks_a_block_and_a_grid_may_be_a_list_as_where_it_is_compiled(grid):
    x, y = torch.arange(1.0, 6.0), torch.zeros(10)
    tritile.autotune([triton.Config({"BLOCK": 8})], [])(first_alone)[grid](x, y, 5)
    assert y.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, *[0.0] * 5]
