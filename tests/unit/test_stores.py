"""No store by descriptor reaches past its result, in any family: told by what launches are handed, no GPU.

The hardware cuts a store off at 16 bytes, and Triton's interpreter at the element, so that answers in the
interpreter do not show it.
"""

import contextlib
import random

import pytest
import torch

from tests.reference import DEFAULT_OUT
from tritile.core.device import target_device
from tritile.core.problem import ITEMSIZE
from tritile.errors import TuningError
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.ops import grouped as groups
from tritile.ops.products import matmul_call
from tritile.runtime.work import Descriptor

H200 = target_device("nvidia-h200")
READ = {"a_desc", "b_desc", "b_rest_desc", "up_desc"}
WRITTEN = {"out_desc", "out_rest_desc"}
HALF = (torch.float16, torch.bfloat16)
PRODUCTS = [
    *((dtype, "ieee", out) for dtype in HALF for out in (dtype, torch.float32)),
    *((torch.float32, precision, torch.float32) for precision in ("tf32", "fp16x3")),
    (torch.int8, "ieee", torch.int32),
    *((torch.float8_e4m3fn, p, out) for p in ("ieee", "fast") for out in (torch.bfloat16, torch.float32)),
]


def meta(shape, strides, offset, dtype):
    """A tensor of these strides, `offset` elements into aligned memory: stands for one on a GPU."""
    reach = offset + 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return torch.empty(reach, dtype=dtype).as_strided(shape, strides, offset)


def viewed(draw, shape, dtype):
    """A matrix, or a batch of them, in rows that may be padded or begin anywhere, or its transpose."""
    *batch, rows, columns = shape
    unit = max(1, 16 // dtype.itemsize)
    turned = draw.random() < 0.3
    inner, outer = (rows, columns) if turned else (columns, rows)
    row = draw.choice([inner, -(-inner // unit) * unit, -(-inner // unit) * unit + 2 * unit, inner + 3])
    strides = [row, 1]
    for size in reversed(batch):
        step = strides[0] * outer
        strides.insert(0, -(-step // unit) * unit if draw.random() < 0.7 else step)
        outer = size
    if turned:
        strides[-2:] = [1, row]
    return meta(shape, strides, draw.choice([0, 0, unit, 1]), dtype)


def sizes(draw):
    return tuple(draw.choice([1, 7, 8, 64, 131, 200]) + draw.choice([0, 0, *range(17)]) for _ in range(3))


def products(draw, dtype, precision, out_dtype):
    m, n, k = sizes(draw)
    batch = draw.choice([(), (), (3,), (2, 3)])
    a, b = viewed(draw, (*batch, m, k), dtype), viewed(draw, (*batch, k, n), dtype)
    plain = dtype in HALF or precision == "tf32"
    extras = {}
    if plain and draw.random() < 0.4:
        extras = {"bias": torch.empty(n, dtype=dtype), "activation": "relu"}
    elif plain and draw.random() < 0.3:
        extras = {"up": viewed(draw, (*batch, k, n), dtype), "activation": "silu"}
    return matmul_call(a, b, viewed(draw, (*batch, m, n), out_dtype), precision, **extras)


def grouped(draw, dtype):
    (m, n, k), count = sizes(draw), 3
    of_a, of_b = draw.choice([((), (count,)), ((count,), ())])
    offs, unit = torch.tensor([1, 2, 3], dtype=torch.int32), 16 // dtype.itemsize
    wide_n, wide_k = (-(-size // unit) * unit for size in (n, k))  # rows start on 16 bytes
    a = torch.empty(*of_a, m, wide_k, dtype=dtype)[..., :k]
    b = torch.empty(*of_b, k, wide_n, dtype=dtype)[..., :n]
    out = viewed(draw, (m, n), DEFAULT_OUT.get(dtype, dtype))
    return groups.grouped_call(a, b, offs, None, None, out, "ieee")


def config_of(draw, call, family):
    """A legal config of the family, drawn; None where the family cannot make the call."""
    own = FAMILIES[call.op][family].configs
    for config in draw.sample(own, min(40, len(own))):
        if illegal(config, call.problem, H200) is None:
            return config
    return None


def written(call, config):
    """Each descriptor that a call's launches write through, and bytes of an element."""
    work = work_of(call, config, H200.processors, True)
    sizes = {name: ITEMSIZE[memory.dtype] for name, memory in call.buffers.items()}
    for step in work.steps:
        described = {name: arg for name, arg in step.args.items() if isinstance(arg, Descriptor)}
        assert set(described) <= READ | WRITTEN, "a descriptor that this test does not know"
        for name in WRITTEN & set(described):
            yield described[name], sizes[described[name].buffer]  # scratch is stored to by pointers alone


def stores(call, config):
    """How many descriptors a call's launches write through, each of rows that are whole 16 bytes."""
    count = 0
    for desc, size in written(call, config):
        row = desc.shape[-1] * size
        assert row % 16 == 0, f"{desc} is cut off {row % 16} bytes into 16, in {config}"
        count += 1
    return count


def drawn(make, op, count, *kind):
    """How many stores by descriptor drawn calls make in all families; each is checked.

    `count` calls are drawn, and more, up to ten times as many, until there is a store.
    """
    draw, found = random.Random(f"{op} {kind}"), 0
    for number in range(10 * count):
        if number >= count and found:
            break
        call = make(draw, *kind)
        for family in FAMILIES[op]:
            config = config_of(draw, call, family)
            if config is not None:
                with contextlib.suppress(TuningError):  # the family's own word that it cannot
                    found += stores(call, config)
    return found


@pytest.mark.parametrize(("dtype", "precision", "out_dtype"), PRODUCTS, ids=str)
def test_products(dtype, precision, out_dtype):
    assert drawn(products, "matmul", 35, dtype, precision, out_dtype) > 0


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_groups(dtype):
    assert drawn(grouped, "grouped", 80, dtype) > 0
