"""Modules that torch's own tests make of products (`module_db`), run with torch's calls made by tritile."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.rounding import FP64, Results, bounds

NAMES = ("Linear", "MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer")


def samples(name: str, device: str, dtype: torch.dtype) -> Iterator[tuple[torch.nn.Module, object]]:
    """A module and its input for every sample, in training and, where that differs, not in training.

    Skips where torch's own tests cannot be imported.
    """
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_modules import module_db

    (info,) = [info for info in module_db if info.name == f"nn.{name}"]
    for training in (True, False) if info.train_and_eval_differ else (True,):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for sample in info.module_inputs_func(info, device, dtype, requires_grad=True, training=training):
                made = sample.constructor_input
                module = info.module_cls(*made.args, **made.kwargs, device=device, dtype=dtype)
                yield module.train(training), sample


def _given(sample, dtype: torch.dtype, device: str):
    """The sample's arguments in this dtype, with no past."""

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.to(device)
        return tensor.detach().to(device, dtype).requires_grad_()

    given = sample.forward_input
    return tree_map_only(torch.Tensor, fresh, (list(given.args), dict(given.kwargs)))


def _results(
    module: torch.nn.Module, sample, dtype: torch.dtype, device: str, made_in: torch.dtype
) -> Results:
    """What a copy of the module gives in this dtype: outputs, and gradients of inputs and parameters."""
    module = copy.deepcopy(module).to(device, dtype)
    args, kwargs = _given(sample, dtype, device)
    generator = torch.Generator().manual_seed(1)
    with sdpa_kernel(SDPBackend.MATH):  # attention made of products
        outs = tree_leaves(module(*args, **kwargs))
    ups = [torch.randn(out.shape, generator=generator).to(made_in).to(device, dtype) for out in outs]
    torch.autograd.backward(outs, ups)
    found = {f"output {i}": out.detach() for i, out in enumerate(outs)}
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    found |= {f"gradient of input {i}": tensor.grad for i, tensor in enumerate(inputs)}
    return found | {f"gradient of {name}": value.grad for name, value in module.named_parameters()}


def _reference(module: torch.nn.Module, sample, dtype: torch.dtype, device: str) -> Results:
    """What torch's tests compare the outputs with, nothing where they have no such function."""
    if sample.reference_fn is None:
        return {}
    args, kwargs = _given(sample, dtype, device)
    with torch.no_grad():
        outs = tree_leaves(sample.reference_fn(module, *args, **kwargs))
    return {f"output {i}": out for i, out in enumerate(outs)}


def _assert_near(got: Results, wanted: Results, most: Results, who: str) -> None:
    for name, value in got.items():
        assert value.shape == wanted[name].shape
        off = (value.to("cpu", FP64) - wanted[name]).abs()
        bad = ~(off <= most[name])  # so that NaN is bad too
        worst = float((off / most[name])[bad].max()) if bad.any() else 0
        assert not bad.any(), (
            f"{who}, {name}: {int(bad.sum())} elements off, at worst {worst:.3g} times the bound"
        )


def check(module: torch.nn.Module, sample, dtype: torch.dtype, device: str, switched) -> int:
    """How many products the sample takes, all of which `switched`, a context that gives a report, must take.

    All that the module gives there is within the bound of `tests.rounding`, as is what it gives without, and
    what the reference of torch's tests gives in `switched`.
    """
    wanted, most, products = bounds(
        lambda: _results(module, sample, FP64, "cpu", dtype), dtype, tensor_cores=device == "cuda"
    )
    like = _results(module, sample, dtype, device, dtype)
    with switched as report:
        got = _results(module, sample, dtype, device, dtype)
    made = [row for row in report.rows if row.call != "clone"]
    assert all(row.taken for row in made), report
    assert bool(made) == bool(products), report
    assert got.keys() == wanted.keys()
    _assert_near(like, wanted, most, "torch")
    _assert_near(got, wanted, most, "with the switch")
    with switched:
        _assert_near(_reference(module, sample, dtype, device), wanted, most, "torch's reference")
    return products
