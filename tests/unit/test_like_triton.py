"""The behaviour that Triton tests of its autotuner, checked for `triton.autotune` and `tritile.autotune`.

Answers come from the interpreter, on host tensors; times are made up. What only a compiler or a driver can
say is in `test_like_triton_compiled`.
"""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")]


def of_blocks(*blocks):
    return [triton.Config({"BLOCK": block}) for block in blocks]


def grid(meta):
    return (triton.cdiv(meta["N"], meta["BLOCK"]),)


class Bench:
    """Make each call once; the first config is the slowest."""

    def __init__(self):
        self.calls = 0

    def __call__(self, call, quantiles):
        assert len(quantiles) == 3
        call()
        self.calls += 1
        return [1.0 / self.calls] * 3


def copy(out, x, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < N), mask=at < N)


def increment_either(x, other, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if x is not None:
        tl.store(x + at, tl.load(x + at, mask=at < N) + 1, mask=at < N)
    else:
        tl.store(other + at, tl.full([BLOCK], 5.0, tl.float32), mask=at < N)


def staged(x, N, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for _ in tl.range((N + BLOCK - 1) // BLOCK, num_stages=STAGES):
        tl.store(x + at, tl.load(x + at, mask=at < N), mask=at < N)
        at += BLOCK


@pytest.fixture
def tuned(autotune):
    """Decorate a function, with made-up times unless `do_bench` is passed; returns the kernel."""

    def decorated(function, **rest):
        return autotune(of_blocks(32, 128), ["N"], **{"do_bench": Bench()} | rest)(triton.jit(function))

    return decorated


def test_without_a_benchmark_the_drivers_is_taken(tuned, gpu):
    requested = []

    def bench(call, quantiles=None, **rest):
        requested.append(quantiles)
        call()
        return [1.0 / len(requested)] * 3

    gpu.get_benchmarker = lambda: bench
    kernel = tuned(copy, do_bench=None)
    x, out = torch.randn(200), torch.zeros(200)
    kernel[grid](out, x, 200)
    assert torch.equal(out, x)
    assert len(kernel.cache) == 1
    assert kernel.best_config in kernel.configs


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("what", "before"), [("restore_value", 0.0), ("reset_to_zero", 7.0)])
def test_tensors_are_restored_or_reset_to_zero_and_none_may_stand_for_one(tuned, what, before, by_name):
    for x in (torch.full((200,), before), None):
        bench, other = Bench(), torch.zeros(200)
        kernel = tuned(increment_either, do_bench=bench, **{what: ["x"]})
        try:
            if by_name:
                kernel[grid](x=x, other=other, N=200)
            else:
                kernel[grid](x, other, 200)
        except AttributeError:
            if type(kernel) is not triton.runtime.Autotuner or x is not None:
                raise
            pytest.skip("this Triton restores no None")
        assert (other == 5).all() if x is None else (x == 1).all()
        assert bench.calls == 2


def test_pruners_are_given_the_call(tuned):
    seen = []

    def early(configs, named, **kwargs):
        seen.append((sorted(named), kwargs["N"]))
        return configs

    def model(out, x, N, BLOCK, num_warps, num_stages, **named):
        seen.append(BLOCK)
        return BLOCK

    kernel = tuned(copy, prune_configs_by={"early_config_prune": early, "perf_model": model, "top_k": 1})
    x, out = torch.randn(1024), torch.zeros(1024)
    kernel[grid](out, x, N=1024)
    assert torch.equal(out, x)
    assert seen == [(["out", "x"], 1024), 32, 128]
    assert kernel.best_config == kernel.configs[0]  # one that is left runs


def test_a_share_that_leaves_no_config_leaves_one(tuned):
    how = {"perf_model": lambda BLOCK, **rest: -BLOCK, "top_k": 0.3}
    kernel = tuned(copy, prune_configs_by=how)
    x, out = torch.randn(200), torch.zeros(200)
    try:
        kernel[grid](out, x, 200)
    except ValueError:
        if type(kernel) is not triton.runtime.Autotuner:
            raise
        pytest.skip("this Triton takes the share by itself, here none")
    assert torch.equal(out, x)
    assert kernel.best_config.kwargs == {"BLOCK": 128}


def test_a_pruner_that_leaves_none_is_an_error(tuned):
    kernel = tuned(copy, prune_configs_by={"early_config_prune": lambda configs, named, **rest: []})
    with pytest.raises(triton.TritonError, match="at least one config"):
        kernel[grid](torch.zeros(200), torch.randn(200), 200)
