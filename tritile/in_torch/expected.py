"""Which calls tritile is expected to win, from what was measured. Pure functions: no tensors, no GPU.

Numbers are of the H200's results (`tuning/results/nvidia-h200`), torch's time by tritile's: above 1, tritile
is faster. What was not measured, or is not near what was, is left.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Final, NamedTuple

from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem, epilogue_of
from tritile.in_torch.peers import Peers

# What a call that Python takes keeps the host busy: 11 to 14 us (`host.jsonl`), and torch's way to Python.
# Where torch's kernel takes less, the host decides how fast a program is that is no CUDA graph, and torch
# needs less of it. A call that is taken without Python needs least: 4 to 6 us, of torch 10 to 18
# (`tuning/switch_cost.py`).
HOST_US: Final = 15.0

_HALF: Final = ("float16", "bfloat16")
_HOPPER: Final = 90
_NOISE: Final = 1.02  # ratios vary by as much from run to run
_NEAR_DOUBLINGS: Final = 1.0
# Bounds of the class of odd products, as they were measured: on how many bytes rows of a, of b or of the
# result start at the most; the shortest side of a result, and K, at the least; and the operations from which
# on its time is the GPU's (of 8193x63x1025, for which torch took 27 us and tritile 16).
_ODD_BYTES: Final = 8
_ODD_LEAST: Final = (500, 500)
_ODD_FLOPS: Final = 1e9
_MOVED: Final = 16 << 20  # bytes for which torch took 14 us and more (2^24 read and as many written, 16-byte)
_LEAST_MOVED: Final = 1 << 19  # the smallest measured, of 512x512 uint8
# How far a measured neighbour must be ahead, by where the config of the problem itself comes from: a
# neighbour's winner was 15% slower than the problem's own (median), the model's pick 1.3%, at worst 22%
# (`study.json`).
_NEEDED: Final = {"exact": 1.05, "pinned": 1.05, "table": 1.05, "predicted": 1.2, "near": 1.2, "model": 1.2}

Source = Callable[[], str]


class Judgement(NamedTuple):
    """Whether tritile is expected to be faster, and why.

    `captured`: only where the host's time does not count, in the capture of a CUDA graph, or is short, as
    where calls alike skip Python.
    """

    take: bool
    why: str
    captured: bool = False


def _ahead(why: str, torch_us: float) -> Judgement:
    return Judgement(True, why, captured=torch_us < HOST_US)


def product(problem: MatmulProblem, device: Device, peers: Peers, source: Source) -> Judgement:
    """Of a product. `source` tells where its config comes from, as `tritile.Plan` does; asked last.

    - fp32 and fp64 in full precision: left (0.2 to 0.9 from 512 up, `square`, `ragged`, `fp64`).
    - a problem that was measured, by its measurement, where the config is a measured one, or is predicted by
      measurements at other sizes, or chosen by the model now as it was then.
    - 16-bit products of which an operand, or the result, has rows that do not start on 16 bytes, on Hopper:
      taken (1.56 to 7.2, `alignments`; 1.2 to 6.3, `ragged` and `llama`; 1.97 and more with an epilogue).
    - one that differs from a measured problem by less than a doubling of sizes in all: by that one's ratio;
      where there is none of the same alignments, by that of one to which it is `in_torch.peers.alike`.
    - any other: left.

    A product with a bias is judged as without, where none with a bias was measured: both sides do it as the
    sums are stored (`epilogue`: 0.97 to 1.21 beside 1.0 to 1.18 in `llm`).
    """
    if problem.precision == "ieee" and problem.dtype not in _HALF:
        return Judgement(False, f"{problem.dtype} in full precision: torch is faster")
    posed = [problem] if not problem.epilogue else [problem, replace(problem, epilogue="")]
    for asked in posed:
        known = peers.exactly(asked)
        if known is not None and source() in ("exact", "pinned", "table", "predicted", known.source):
            if known.ratio < _NOISE:
                return Judgement(False, "measured: torch is about as fast, or faster")
            return _ahead("measured: tritile is faster", known.torch_us)
    if _odd(problem, device):
        why = f"16-bit rows that do not start on {2 * _ODD_BYTES} bytes: tritile is faster"
        return Judgement(True, why, captured=problem.flops < _ODD_FLOPS)
    for asked in posed:
        near = peers.nearest(asked, _NEAR_DOUBLINGS)
        if near is not None:
            if near.ratio < _NEEDED["exact"] or near.ratio < _NEEDED[source()]:
                return Judgement(False, "a problem of near sizes: torch is about as fast, or faster")
            why = "a problem of near sizes: tritile is faster"
            return _ahead(why, near.torch_us * problem.flops / near.problem.flops)
    return Judgement(False, "nothing near was measured on this GPU")


def _odd(problem: MatmulProblem, device: Device) -> bool:
    """Whether it is of the class of odd 16-bit products that was measured: see the bounds above."""
    sides, depth = _ODD_LEAST
    return (
        device.nvidia == _HOPPER
        and problem.dtype in _HALF
        and problem.batch == 1
        and min(problem.a_align, problem.b_align, problem.out_align) <= _ODD_BYTES
        and "strided" not in (problem.a_layout, problem.b_layout, problem.out_layout)
        and min(problem.m, problem.n) >= sides
        and problem.k >= depth
        and not epilogue_of(problem.epilogue).activation
    )


def copy(problem: PermuteProblem, device: Device) -> Judgement:
    """Of a copy: of whole memory in another order of dimensions on Hopper, taken from 512 KiB moved on.

    All of `permute` and `transpose` were ahead, by 1.11 to 32: 2 to 6 dimensions, 1 to 16 bytes an element,
    512 KiB to 4 GiB moved. Below 16 MiB torch takes 4 to 14 us, which are the host's.
    """
    whole = problem.spans[0] == problem.spans[1] == prod(problem.shape)
    if problem.x_strides == problem.out_strides:
        return Judgement(False, "no dimension changes its place")
    if not whole or 0 in problem.x_strides:
        return Judgement(False, "a part of a tensor, or a repeated one: not measured")
    if device.nvidia != _HOPPER:
        return Judgement(False, "nothing near was measured on this GPU")
    if problem.bytes < _LEAST_MOVED:
        return Judgement(False, "less than 512 KiB moved: not measured")
    return Judgement(True, "another order of dimensions: tritile is faster", problem.bytes < _MOVED)
