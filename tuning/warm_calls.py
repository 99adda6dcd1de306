"""Measure what a warm call of a decorated kernel costs the host, under triton.autotune and tritile.autotune.

    python tuning/warm_calls.py                      # every kind: under a minute
    python tuning/warm_calls.py --only key           # those with that in their name
    python tuning/warm_calls.py --output warm.jsonl  # append the lines to a file
    python tuning/warm_calls.py --simulated          # without a GPU: nothing is launched

Both tuners decorate the same kernel with the same configs, and are tuned before anything is timed. Calls are
timed by turns in one process (`host_us`): each figure is the median of the means of batches of 20, so that
what else the machine does, or a collection of garbage, does not count, as it does in a mean, and what a
cache costs as it fills does, as it does not in the best. The GPU is waited for before each batch, untimed, so
that no launch waits for room in its queue. Calls are made in mode "tune", as by TRITILE_MODE=tune, in which
tritile.autotune does what triton.autotune does. A line has the microseconds of each and their ratio, triton's
by tritile's; triton's are null for keys that it does not take.
"""

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import tritile  # noqa: E402
from bench import host_us  # noqa: E402
from tritile.core.device import current_gpu  # noqa: E402
from tritile.lab.environment import environment  # noqa: E402
from unseen import environ  # noqa: E402

SIDES = {"tritile": tritile.autotune, "triton": triton.autotune}
SIZE = 64
CHAIN = 20
Call = Callable[[], Any]
Decorate = Callable[..., Callable[[Any], Any]]  # an autotune, less the benchmark
Row = dict[str, Any]


@triton.jit
def scale(
    x_ptr, out_ptr, n, factor,
    BLOCK: tl.constexpr, TAG: tl.constexpr = None, ACTIVATION: tl.constexpr = "",
):  # fmt: skip
    """out = x * factor. TAG is there to be a key of any type."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    tl.store(out_ptr + offsets, x * factor, mask=offsets < n)


@triton.jit
def gated(
    q, k, v, g, h0, out, cu_seqlens, chunk_indices, scale, T,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    USE_G: tl.constexpr, USE_H0: tl.constexpr, IS_VARLEN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out = q * k * v * scale, with the arguments of a kernel of gated linear attention."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < T
    result = tl.load(q + offsets, mask=mask) * tl.load(k + offsets, mask=mask)
    result *= tl.load(v + offsets, mask=mask) * scale
    if USE_G:
        result *= tl.load(g + offsets, mask=mask)
    if USE_H0:
        result += tl.load(h0 + offsets, mask=mask)
    tl.store(out + offsets, result, mask=mask)


@triton.jit
def copy_described(x_desc, out_desc, n, BLOCK: tl.constexpr):
    """out = x by descriptors that the host made."""
    column = tl.program_id(0) * BLOCK
    out_desc.store([0, column], x_desc.load([0, column]))


@triton.jit
def copy_describing(x_ptr, out_ptr, m, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out = x by descriptors that the device makes."""
    x = tl.make_tensor_descriptor(x_ptr, shape=[m, n], strides=[n, 1], block_shape=[ROWS, BLOCK])
    out = tl.make_tensor_descriptor(out_ptr, shape=[m, n], strides=[n, 1], block_shape=[ROWS, BLOCK])
    column = tl.program_id(0) * BLOCK
    out.store([0, column], x.load([0, column]))


def configs_of(**more: Any) -> list[triton.Config]:
    """Return two configs, of which `Bench` calls the first the faster."""
    return [triton.Config({"BLOCK": block}, num_warps=1, **more) for block in (64, 32)]


def grid(meta: Any) -> tuple[int, ...]:
    """Return the programs that cover SIZE elements."""
    return (triton.cdiv(SIZE, meta["BLOCK"]),)


class Bench:
    """Run each config once, and say that it took longer than the one before."""

    def __init__(self) -> None:
        self._calls = itertools.count(1)

    def __call__(self, call: Call, quantiles: Any) -> list[float]:
        call()
        return [float(next(self._calls))] * 3


def decorated(side: str, *args: Any, **more: Any) -> Callable[[Any], Any]:
    """Return one side's autotune, with a benchmark that times nothing."""
    decorator: Callable[[Any], Any] = SIDES[side](*args, do_bench=Bench(), **more)
    return decorator


def tensor(*shape: int, **more: Any) -> torch.Tensor:
    """Return a tensor of float32."""
    return torch.ones(*(shape or (SIZE,)), device=DEVICE, **more)


DEVICE = "cuda"  # "meta" under --simulated
KINDS: dict[str, Callable[[Decorate], Call]] = {}  # by name: what returns a call of a kernel so decorated
# triton.autotune tunes anew for each tensor, and raises TypeError for a descriptor, which has no hash.
OURS_ALONE = {"key: new tensor", "key: descriptor"}
# torch runs an operator's own code on a GPU's tensors, and traces it on those that stand for them.
ON_GPU_ALONE = {"custom operator"}


def kind(name: str) -> Callable[[Callable[[Decorate], Call]], Callable[[Decorate], Call]]:
    """Add a function to KINDS."""
    return lambda make: KINDS.setdefault(name, make)


@kind("positional")
def positional(decorate: Decorate) -> Call:
    kernel, x, out = decorate(configs_of(), ["n"])(scale), tensor(), tensor()
    return lambda: kernel[grid](x, out, SIZE, 2.0)


@kind("changing integer")
def changing_integer(decorate: Decorate) -> Call:
    kernel, x, out, count = decorate(configs_of(), [])(scale), tensor(), tensor(), itertools.count(3, 2)
    return lambda: kernel[grid](x, out, next(count), 2.0)


@kind("changing tensors")
def changing_tensors(decorate: Decorate) -> Call:
    kernel, out = decorate(configs_of(), ["n"])(scale), tensor()
    tensors = itertools.cycle([tensor() for _ in range(100)])
    return lambda: kernel[grid](next(tensors), out, SIZE, 2.0)


@kind("problems by turns")
def problems_by_turns(decorate: Decorate) -> Call:
    kernel, x, out = decorate(configs_of(), ["n"])(scale), tensor(), tensor()
    sizes = itertools.cycle([SIZE, SIZE - 4, SIZE - 8])
    return lambda: kernel[grid](x, out, next(sizes), 2.0)


@kind("constexpr by keyword")
def constexpr_by_keyword(decorate: Decorate) -> Call:
    kernel, x, out = decorate(configs_of(), ["n"])(scale), tensor(), tensor()
    return lambda: kernel[grid](x, out, SIZE, 2.0, ACTIVATION="")


def pruned(configs: list[triton.Config], named: Any, **more: Any) -> list[triton.Config]:
    """Leave the configs whose block is no larger than T."""
    return [config for config in configs if config.kwargs["BLOCK"] <= {**named, **more}["T"]]


ABOVE = {name: (lambda args, of=of: args[of] is not None)
         for name, of in {"USE_G": "g", "USE_H0": "h0", "IS_VARLEN": "cu_seqlens"}.items()}  # fmt: skip
BELOW = {"EVEN": lambda args: args["T"] % args["BLOCK"] == 0}


def heuristics_of(decorate: Decorate, function: Any = gated, **more: Any) -> Any:
    """Return a kernel with heuristics above and below its tuner."""
    tuner = decorate(
        configs_of(), ["H", "K", "BT", "IS_VARLEN"], cache_results=True,
        prune_configs_by={"early_config_prune": pruned}, **more,
    )  # fmt: skip
    return triton.heuristics(ABOVE)(tuner(triton.heuristics(BELOW)(function)))


def named_call(kernel: Any, x: torch.Tensor, out: torch.Tensor, **more: Any) -> Any:
    """Call a kernel as gated linear attention does: all by name, None for what is not given."""
    return kernel[grid](
        q=x, k=x, v=x, g=x, h0=None, out=out, cu_seqlens=None, chunk_indices=None, scale=0.5, T=SIZE,
        H=4, K=64, BT=64, **more,
    )  # fmt: skip


@kind("heuristics")
def heuristics(decorate: Decorate) -> Call:
    kernel, x, out = heuristics_of(decorate), tensor(), tensor()
    return lambda: named_call(kernel, x, out, ROWS=1)


@kind("hooks")
def hooks(decorate: Decorate) -> Call:
    configs = configs_of(pre_hook=lambda named: named["BLOCK"])
    kernel = decorate(configs, ["n"], restore_value=["x_ptr"], reset_to_zero=["out_ptr"])(scale)
    x, out = tensor(), tensor()
    return lambda: kernel[grid](x, out, SIZE, 2.0)


def descriptors() -> list[TensorDescriptor]:
    return [TensorDescriptor.from_tensor(tensor(16, SIZE), [16, 32]) for _ in range(2)]


@kind("host descriptors")
def host_descriptors(decorate: Decorate) -> Call:
    def set_block_shapes(named: dict[str, Any]) -> None:  # as tutorial 09
        for name in ("x_desc", "out_desc"):
            named[name].block_shape = [16, named["BLOCK"]]

    kernel = decorate(configs_of(pre_hook=set_block_shapes), ["n"])(copy_described)
    x, out = descriptors()
    return lambda: kernel[grid](x, out, SIZE)


@kind("device descriptors")
def device_descriptors(decorate: Decorate) -> Call:
    triton.set_allocator(lambda size, align, stream: torch.empty(size, device=DEVICE, dtype=torch.int8))
    kernel, x, out = decorate(configs_of(), ["m", "n"])(copy_describing), tensor(16, SIZE), tensor(16, SIZE)
    return lambda: kernel[grid](x, out, 16, SIZE, ROWS=16)


@kind("nested")
def nested(decorate: Decorate) -> Call:
    # The outer tuner must leave Triton's options to the inner one, or the call has each of them twice.
    unset = {"num_warps": None, "num_stages": None, "num_ctas": None}
    outer = decorate([triton.Config({"ROWS": rows}, **unset) for rows in (1, 2)], ["T"])
    kernel, x, out = outer(heuristics_of(decorate)), tensor(), tensor()
    return lambda: named_call(kernel, x, out)


@kind("custom operator")
def custom_operator(decorate: Decorate) -> Call:
    kernel = decorate(configs_of(), ["n"])(scale)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(kernel)[grid](x, out, SIZE, 2.0)
        return out

    operator = torch.library.triton_op(f"warm_calls::scaled{next(NUMBERS)}", scaled, mutates_args=())
    x = tensor()
    return lambda: operator(x)


NUMBERS = itertools.count()  # an operator's name is taken for good


@kind("forward and backward")
def forward_and_backward(decorate: Decorate) -> Call:
    kernels = [[heuristics_of(decorate, triton.jit(gated.fn)) for _ in range(CHAIN)] for _ in range(2)]

    class Chain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            for kernel in kernels[0]:
                named_call(kernel, x, out, ROWS=1)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(grad)
            for kernel in kernels[1]:
                named_call(kernel, grad, out, ROWS=1)
            return out

    x, grad = tensor(requires_grad=True), tensor()
    return lambda: torch.autograd.grad(Chain.apply(x), x, grad)


def of_key(value: Any) -> Callable[[Decorate], Call]:
    """Return what makes a call with such a value in its key."""

    def make(decorate: Decorate) -> Call:
        kernel, x, out = decorate(configs_of(), ["n", "TAG"])(scale), tensor(), tensor()
        return lambda: kernel[grid](x, out, SIZE, 2.0, TAG=value)

    return make


KEYS = {
    "integer": 7, "bool": True, "str": "bf16", "dtype": torch.float16, "triton dtype": tl.float16,
    "None": None, "tuple": (1, 2), "NaN": float("nan"), "np.int64": np.int64(7),
}  # fmt: skip
KINDS.update({f"key: {name}": of_key(value) for name, value in KEYS.items()})


@kind("key: tensor")
def key_of_a_tensor(decorate: Decorate) -> Call:
    """The same one at each call: triton.autotune tells tensors apart by identity."""
    kernel, x, out = decorate(configs_of(), ["x_ptr"])(scale), tensor(), tensor()
    return lambda: kernel[grid](x_ptr=x, out_ptr=out, n=SIZE, factor=2.0)


@kind("key: new tensor")
def key_of_a_new_tensor(decorate: Decorate) -> Call:
    kernel, x, out = decorate(configs_of(), ["x_ptr"])(scale), tensor(), tensor()
    return lambda: kernel[grid](x_ptr=x.view(-1), out_ptr=out, n=SIZE, factor=2.0)


@kind("key: descriptor")
def key_of_a_descriptor(decorate: Decorate) -> Call:
    configs = [triton.Config({"BLOCK": 32}, num_warps=warps) for warps in (1, 2)]
    kernel, (x, out) = decorate(configs, ["x_desc"])(copy_described), descriptors()
    return lambda: kernel[grid](x, out, SIZE)


def measured(name: str, batches: int) -> Row:
    """Return the microseconds of a kind's warm call under each tuner."""
    calls = {}
    for side in SIDES:
        if side == "tritile" or name not in OURS_ALONE:
            calls[side] = KINDS[name](partial(decorated, side))
            with tritile.mode("tune"):
                calls[side]()
    found = dict(zip(calls, host_us(*calls.values(), batches=batches), strict=True))
    us = {f"{side}_us": round(found[side], 2) if side in found else None for side in SIDES}
    ratio = round(found["triton"] / found["tritile"], 3) if "triton" in found else None
    return {"kind": name, **us, "ratio": ratio}


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Have kernels be compiled for a GPU that is not there, and not launched."""
    global DEVICE
    from tests.mock_gpu import mock_gpu

    DEVICE = "meta"
    with mock_gpu():
        yield


def table(rows: list[Row]) -> str:
    """Return lines that a reader compares: microseconds by kind."""
    lines = [f"{'kind':22} {'tritile, us':>12} {'triton, us':>11} {'ratio':>6}"]
    for row in rows:
        triton_us, ratio = ("-" if row[name] is None else row[name] for name in ("triton_us", "ratio"))
        lines.append(f"{row['kind']:22} {row['tritile_us']:12} {triton_us:>11} {ratio:>6}")
    return "\n".join(lines)


def main() -> int:
    """Measure every kind; the exit status is 0 if all calls worked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="kinds with this in their name")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the lines to this file")
    parser.add_argument(
        "--batches", type=int, default=50, help="batches of each kind and tuner (%(default)s)"
    )
    parser.add_argument("--size", type=int, default=20, help="calls of a batch (%(default)s)")
    parser.add_argument("--mode", default="tune", help="the mode that calls are made in (%(default)s)")
    parser.add_argument("--simulated", action="store_true", help="launch nothing, so that no GPU is needed")
    asked, rows = parser.parse_args(), []
    with contextlib.ExitStack() as stack:
        if asked.simulated:
            stack.enter_context(simulated())
        gpu = current_gpu()
        if gpu is None:
            sys.exit("there is no GPU here to measure: --simulated needs none")
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(environ(TRITILE_CACHE_DIR=folder, TRITILE_MODE=asked.mode))
        env = environment(gpu) | {"gpu": f"simulated {gpu.name}" if asked.simulated else gpu.name}
        left_out = ON_GPU_ALONE if asked.simulated else set()
        for name in (each for each in KINDS if asked.only in each and each not in left_out):
            row = measured(name, asked.batches)
            rows.append(row | {key: env[key] for key in ("gpu", "triton", "torch", "tritile")})
            print(json.dumps(rows[-1]), flush=True)
            if asked.output:
                with asked.output.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
