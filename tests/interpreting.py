"""Triton's interpreter as tests need it: right where it errs, and quick enough for thousands of them.

A plugin of pytest, which tests/conftest.py loads where TRITON_INTERPRET is set. All kernels of such a
process are interpreted, so that what is changed here stays changed until the process ends.
"""

import dataclasses
import types

import numpy as np
import pytest
import triton.experimental.gluon.language  # noqa: F401  (keeps what it finds in triton.language: before patches)
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")  # numpy's, of NaN and of overflow
    _patch_language_once()
    _leave_overflow_unchecked()
    _spread_truth_values()
    _make_types_once()


def _patch_language_once() -> None:
    """Patch triton.language for good; the interpreter looks through all of it at each call of a function."""
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    unpatched = types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: unpatched


def _leave_overflow_unchecked() -> None:
    """Spare the check of integers for overflow, which takes half of the time and reports nothing."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _spread_truth_values() -> None:
    """Let comparisons of scalars mask blocks: spread, they become integers, which Triton 3.9 refuses."""
    whole = InterpreterBuilder.create_splat

    def create_splat(self, block, scalar):
        if scalar.data.dtype == np.bool_:
            scalar = TensorHandle(scalar.data, tl.int1)
        return whole(self, block, scalar)

    InterpreterBuilder.create_splat = create_splat


def _make_types_once() -> None:
    """Make what follows from a type alone once, where the interpreter makes it for each value."""
    block, tensor, made = tl.block_type.__init__, tl.tensor.__init__, {}
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(type):
        if type.name not in found:
            found[type.name] = find(type)
        return found[type.name]

    def make_block(self, element_ty, shape):
        key = element_ty.name, tuple(shape)
        if key not in made:
            block(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key], element_ty=element_ty)

    def make_tensor(self, handle, type):
        if type.name not in made:
            tensor(self, handle, type)
            made[type.name] = dict(vars(self))
        vars(self).update(made[type.name], handle=handle, type=type, dtype=type.scalar)

    tl.block_type.__init__, tl.tensor.__init__ = make_block, make_tensor
    interpreter._get_np_dtype = numpy_type


@pytest.fixture
def summed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `tl.dot` add products one after the other, in the order of K, as one GPU does.

    numpy leaves the order to a BLAS, which takes another at the edges of a matrix.
    """
    whole = InterpreterBuilder.create_dot

    def create_dot(self, a, b, acc, *how):
        for k in range(a.data.shape[-1]):
            column = TensorHandle(a.data[..., k : k + 1], a.dtype)
            row = TensorHandle(b.data[..., k : k + 1, :], b.dtype)
            acc = whole(self, column, row, acc, *how)
        return acc

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
