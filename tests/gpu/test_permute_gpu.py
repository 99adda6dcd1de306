"""tritile.permute, transpose and contiguous on a GPU, bit for bit."""

import pytest
import torch

import tritile
from tests.cases.permute import *  # noqa: F403
from tests.cases.permute import WAYS, bits, check, goes_as_said
from tests.configs import boxed, turned
from tests.launched import needs_memory
from tests.reference import name, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh", "poison")]
SIZED = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]  # 1 to 16 bytes


def test_expanded_and_overlapping_inputs():
    _, flat = bits((1000,), torch.int32)
    for x in (flat[:70].expand(50, 70), flat[:50, None].expand(50, 70), flat.unfold(0, 64, 1)):
        assert torch.equal(tritile.transpose(x), x.mT)


@pytest.mark.parametrize("count", [65535, 65536, 131073])
def test_more_matrices_than_grid(count):
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
def test_runs_beyond_2_31_elements(shape, order):
    needs_memory(12)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    assert x.numel() >= 2**31
    got, wanted = tritile.permute(x, order), x.permute(order)
    for i in range(0, len(got), -(-len(got) // 8)):  # in slices, to spare memory
        part = slice(i, i + -(-len(got) // 8))
        assert bool((got[part] == wanted[part]).all()), i


TILES = [turned(1, 512), turned(512, 1), turned(16, 2048, 8), turned(256, 128, 8, 32), turned(64, 64, 4, 8)]
BOXES = [boxed(4096, 64, 4), boxed(8192, 256, 16), boxed(8192, 64, 8)]
WIDE = [((2, 777, 531), (0, 2, 1)), ((33, 5, 77, 41), (3, 1, 2, 0)), ((900, 38), (1, 0))]
THIN = [
    ((3, 100003), (1, 0)), ((2, 65536), (1, 0)), ((5, 9, 7, 2149), (2, 1, 3, 0)),
    ((34241, 2, 10, 3), (2, 0, 1, 3)), ((147, 32, 31, 9), (1, 2, 0, 3)),
    ((40, 35, 5, 40, 8), (1, 0, 2, 4, 3)), ((700, 64), (1, 0)),
]  # fmt: skip
# Configs, dtypes and permutations, of which at least so many are legal.
BY_CONFIG = [(config, dtype, WIDE[:1], 0) for config in TILES for dtype in (torch.uint8, torch.complex128)]
BY_CONFIG += [(config, dtype, WIDE[:1] + THIN, 8) for config in BOXES for dtype in SIZED[:4]]


@pytest.mark.parametrize("offsets", [(0, 0), (1, 3)], ids=str)
@pytest.mark.parametrize(
    ("config", "dtype", "permutations", "least"),
    BY_CONFIG,
    ids=lambda value: str(len(value) if isinstance(value, list) else value),
)
def test_configs_between_places_that_offsets_say(config, dtype, permutations, least, offsets):
    found = [check(shape, order, dtype, config, offsets) for shape, order in permutations]
    ran = sum(problem is not None for problem in found)
    assert ran >= least
    if not ran:
        pytest.skip("illegal for this type on this GPU")


@pytest.mark.parametrize("case", WAYS, ids=lambda case: case[-1])
def test_boxes_go_each_way(case):
    goes_as_said(case)
    for offsets in ((1, 0), (2, 3), (9, 5)):
        check(*case[:4], offsets)


def test_chain_of_early_permutations():
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


@pytest.mark.parametrize("dtype", SIZED, ids=name)
@pytest.mark.parametrize(("shape", "order"), ORDERS, ids=str)
def test_orders_of_dimensions(shape, order, dtype):
    raw, x = bits(shape, dtype)
    wanted = raw.permute(*order, len(shape))
    assert same_bits(tritile.permute(x, order), wanted)
    assert same_bits(tritile.permute(x, order), wanted)  # by what was prepared
    back = tuple(order.index(i) for i in range(len(shape)))
    assert same_bits(tritile.permute(tritile.permute(x, order), back), raw)
