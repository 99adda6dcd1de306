"""tritile.permute, transpose and contiguous on a GPU, bit for bit."""

import functools
import math
import random

import pytest
import torch

import tritile
from tests.configs import boxed, turned
from tests.launched import needs_memory
from tests.reference import (
    COMPLEX,
    DTYPES,
    LAYOUTS,
    SIGN_BYTES,
    frame,
    guard_intact,
    name,
    placed,
    random_bits,
    same_bits,
    words_of,
)
from tritile.core.device import current_gpu
from tritile.families.space import illegal
from tritile.ops import permute as permute_op
from tritile.runtime import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]
SIZED = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]  # 1 to 16 bytes


bits = functools.partial(random_bits, device="cuda")


SHAPES = [
    (1, 1), (1, 4099), (4099, 1), (3, 10007), (10007, 3), (64, 64), (2047, 2049), (4096, 8), (3, 129, 65),
    (300, 5, 7), (0, 5), (5, 0, 3),
]  # fmt: skip


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128], ids=name)
def test_shapes(dtype, shape):
    raw, x = bits(shape, dtype)
    assert same_bits(tritile.transpose(x), raw.transpose(-3, -2))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_nothing_around_out_is_touched(dtype):
    """Rows start on 16 bytes and end anywhere, or start anywhere, in x and in out."""
    for m, n in ((129, 131), (3, 7), (130, 134)):
        for batch, dims in (((), (1, 0)), ((3,), (2, 0, 1))):
            raw, x = bits((*batch, m, n), dtype)
            for layout in ("padded", "column_padded", "sliced", "offset"):
                buffer, out = frame(tuple(x.shape[i] for i in dims), dtype, layout, "cuda")
                for _ in range(2):  # the second call takes the fast path
                    assert tritile.permute(placed(x, "padded"), dims, out=out) is out
                    assert same_bits(out, raw.permute(*dims, x.ndim))
                    assert guard_intact(buffer, out), (m, n, dims, layout)


def test_expanded_and_overlapping_inputs():
    _, flat = bits((1000,), torch.int32)
    for x in (flat[:70].expand(50, 70), flat[:50, None].expand(50, 70), flat.unfold(0, 64, 1)):
        assert torch.equal(tritile.transpose(x), x.mT)


@pytest.mark.parametrize("dtype", COMPLEX, ids=name)
def test_lazy_conjugation_and_negation(dtype):
    raw, x = bits((130, 70), dtype)
    conjugated = raw.clone()
    conjugated[..., -1] ^= 128
    negated = conjugated.clone()
    negated[..., SIGN_BYTES[dtype] - 1] ^= 128
    cases = [
        (x, raw),
        (x.conj(), conjugated),
        (torch._neg_view(x), negated),
        (x.conj(), conjugated),
        (x, raw),
    ]
    for _ in range(2):  # the second time over the fast path
        for lazy, expected in cases:
            got = tritile.transpose(lazy)
            assert not got.is_conj()
            assert not got.is_neg()
            assert same_bits(got, expected.transpose(0, 1))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("count", [65535, 65536, 131073])
def test_more_matrices_than_a_grid_axis_holds(count):
    raw, x = bits((count, 5, 3), torch.int16)
    assert same_bits(tritile.transpose(x), raw.transpose(1, 2))


@pytest.mark.serial
@pytest.mark.parametrize("shape", [(46349, 46351), (2**31 + 4099, 2), (3, 2**30 + 7)], ids=str)
def test_beyond_2_to_31_elements(shape):
    needs_memory(10)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    got = tritile.transpose(x)
    assert tuple(got.shape) == shape[::-1]
    step = 2**27 // min(shape)
    for start in range(0, max(shape), step):  # in slices, to spare memory
        part = slice(start, start + step)
        left, right = (got[part], x[:, part].mT) if shape[1] > shape[0] else (got[:, part], x[part].mT)
        assert bool((left == right).all()), start


@pytest.mark.serial
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((33554437, 8, 8), (2, 1, 0)),
        ((2097153, 8, 8, 16), (3, 1, 0, 2)),
        ((2097153, 16, 4, 16), (0, 3, 2, 1)),
        ((1048577, 16, 8, 16), (0, 2, 3, 1)),
    ],
    ids=str,
)
def test_runs_of_several_dimensions_beyond_2_to_31_elements(shape, order):
    needs_memory(12)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    assert x.numel() >= 2**31
    got, wanted = tritile.permute(x, order), x.permute(order)
    for i in range(0, len(got), -(-len(got) // 8)):  # in slices, to spare memory
        part = slice(i, i + -(-len(got) // 8))
        assert bool((got[part] == wanted[part]).all()), i


TILES = [turned(1, 512), turned(512, 1), turned(16, 2048, 8), turned(256, 128, 8, 32), turned(64, 64, 4, 8)]
PACKED = [turned(*one, "packed") for one in ((128, 128, 8, 32), (64, 32, 4, 1), (512, 64, 16, 256))]
BOXES = [boxed(64, 32, 4096), boxed(256, 512, 8192), boxed(1024, 1, 4096)]
WIDE = [((2, 777, 531), (0, 2, 1)), ((33, 5, 77, 41), (3, 1, 2, 0)), ((900, 38), (1, 0))]
THIN = [
    ((3, 100003), (1, 0)), ((2, 65536), (1, 0)), ((5, 9, 7, 2149), (2, 1, 3, 0)),
    ((34241, 2, 10, 3), (2, 0, 1, 3)), ((147, 32, 31, 9), (1, 2, 0, 3)),
    ((40, 35, 5, 40, 8), (1, 0, 2, 4, 3)), ((700, 64), (1, 0)),
]  # fmt: skip
# Configs, dtypes and permutations, of which at least so many are legal.
BY_CONFIG = [(config, dtype, WIDE[:1], 0) for config in TILES for dtype in (torch.uint8, torch.complex128)]
BY_CONFIG += [(config, dtype, WIDE, 3) for config in PACKED for dtype in SIZED[:2]]
BY_CONFIG += [(config, dtype, THIN, 3) for config in BOXES for dtype in SIZED[:4]]


@pytest.mark.parametrize("offsets", [(0, 0), (1, 3)], ids=str)
@pytest.mark.parametrize(
    ("config", "dtype", "permutations", "least"),
    BY_CONFIG,
    ids=lambda value: str(len(value) if isinstance(value, list) else value),
)
def test_configs_between_places_that_offsets_say(config, dtype, permutations, least, offsets):
    """Nothing else is touched."""
    (x_at, out_at), ran = offsets, 0
    for shape, order in permutations:
        raw, flat = bits((x_at + math.prod(shape),), dtype)
        x, wanted = flat[x_at:].view(shape), raw[x_at:].view(*shape, -1).permute(*order, len(shape))
        _, buffer = bits((out_at + math.prod(shape) + 9,), dtype, seed=1)
        before, end = words_of(buffer).clone(), out_at + math.prod(shape)
        out = buffer[out_at:end].view(wanted.shape[:-1])
        call = permute_op.permute_call(x, out, order)
        if illegal(config, call.problem, current_gpu()) is None:
            launch.prepare(call, config)(*call.tensors)
            assert same_bits(out, wanted)
            after = words_of(buffer)
            assert torch.equal(after[:out_at], before[:out_at])
            assert torch.equal(after[end:], before[end:])
            ran += 1
    assert ran >= least
    if not ran:
        pytest.skip("illegal for this type on this GPU")


def test_a_chain_of_permutations_that_start_early():
    raw, x = bits((512, 513), torch.bfloat16)
    y = x
    for _ in range(101):
        y = tritile.transpose(y)
    assert same_bits(y, raw.transpose(0, 1))


ORDERS = [
    ((4, 33, 6, 64), (0, 2, 1, 3)), ((3, 57, 5, 40), (0, 2, 3, 1)), ((2, 3, 65, 67), (0, 2, 3, 1)),
    ((2, 65, 67, 3), (0, 3, 1, 2)), ((2, 4, 2, 2, 17, 19), (0, 1, 4, 2, 5, 3)), ((9, 1000), (1, 0)),
    ((3, 3, 14, 8, 14, 8), (0, 2, 4, 3, 5, 1)), ((7, 5, 3, 2, 11, 13), (5, 4, 3, 2, 1, 0)),
    ((131, 3, 7), (2, 0, 1)), ((40, 50, 60), (0, 1, 2)),
]  # fmt: skip


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", SIZED, ids=name)
@pytest.mark.parametrize(("shape", "order"), ORDERS, ids=str)
def test_orders_of_dimensions(shape, order, dtype):
    raw, x = bits(shape, dtype)
    wanted = raw.permute(*order, len(shape))
    assert same_bits(tritile.permute(x, order), wanted)
    assert same_bits(tritile.permute(x, order), wanted)  # by what was prepared
    back = tuple(order.index(i) for i in range(len(shape)))
    assert same_bits(tritile.permute(tritile.permute(x, order), back), raw)


@pytest.mark.parametrize("seed", range(40))
def test_any_permutation_of_any_permuted_view(seed):
    draw = random.Random(seed)
    shape = tuple(draw.choice((1, 2, 3, 5, 8, 17, 33)) for _ in range(draw.randint(2, 5)))
    axes, dtype = range(len(shape)), draw.choice(DTYPES)
    dims, lies = (draw.sample(axes, len(shape)) for _ in range(2))
    raw, x = bits(shape, dtype, seed)
    x = placed(x, draw.choice(LAYOUTS)).permute(*lies)
    expected = raw.permute(*lies, len(shape)).permute(*dims, len(shape))
    assert same_bits(tritile.permute(x, dims), expected)


@pytest.mark.parametrize("size", [1, 64, 2049])
@pytest.mark.parametrize("dtype", SIZED, ids=name)
def test_square_matrices_in_place(size, dtype):
    raw, x = bits((3, size, size), dtype)
    raw = raw.clone()
    for turns in range(3):
        assert tritile.transpose(x, out=x) is x
        assert same_bits(x, raw.transpose(1, 2) if turns % 2 == 0 else raw)
    other = torch.empty_like(x)
    assert same_bits(tritile.transpose(x, out=other), raw)  # what was prepared in place is not taken for this
    assert same_bits(tritile.contiguous(x.mT), raw)
