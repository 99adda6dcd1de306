"""The authors' kernels in Triton's interpreter, against torch in double precision.

Outputs start as NaN, and where rows have gaps between them these are NaN too, and must stay so.
"""

import pytest
import torch

from authors import ATTENTION_SPACE, ROW_SPACE, SUBJECTS, attention_tile_fits, configs_of, row_tile_fits

pytestmark = pytest.mark.interpreted

HALF_AND_SINGLE = (torch.float16, torch.float32)  # the interpreter is silently wrong in bfloat16


def ran(name, given, **parameters):
    """The arguments after a run of the kernel."""
    subject = SUBJECTS[name]
    assert list(given) == [n for n in subject.kernel.arg_names if n not in parameters]
    subject.kernel[subject.grid(**given)(parameters)](**given, **parameters)
    return given


def check(name, given, largest=16, **parameters):
    """Run, and compare what was written with torch's answer in double precision.

    `largest`: about how large are the numbers that an fp32 sum or exponent rounds on the way.
    """
    wide = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    wanted = SUBJECTS[name].reference(**wide)
    ran(name, given, **parameters)
    for argument, expected in wanted.items():
        got = given[argument]
        allowed = torch.finfo(got.dtype).eps + largest * torch.finfo(torch.float32).eps
        torch.testing.assert_close(got.double(), expected.double(), rtol=allowed, atol=allowed)


def inputs(name, shape, dtype=torch.float32):
    return SUBJECTS[name].inputs(shape, dtype, "cpu")


@pytest.mark.parametrize(("rows", "count"), [(1, 4), (4, 3)])
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 97])  # of blocks of 32
@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_rows_of_any_length(name, dtype, columns, rows, count):
    given = inputs(name, (count, columns), dtype)
    x, out = (torch.full((count, columns + 7), float("nan"), dtype=dtype) for _ in range(2))
    x[:, :columns] = given["x_ptr"]
    given |= {"x_ptr": x[:, :columns], "out_ptr": out[:, :columns]}
    given |= {"stride_x": columns + 7, "stride_out": columns + 7}
    check(name, given, ROWS=rows, BLOCK=32)
    assert out[:, columns:].isnan().all()


@pytest.mark.parametrize("block", [16, 64])
def test_softmax_of_large_and_infinite_elements(block):
    given = inputs("softmax", (4, 50))
    x, infinity = given["x_ptr"], float("inf")
    x *= 1e4
    check("softmax", given, ROWS=1, BLOCK=block)
    x[0, :40] = -infinity  # whole blocks of nothing, then something
    x[1, 20:] = -infinity  # something, then nothing
    x[2] = -infinity  # 0 / 0, as torch has it
    x[3, 7] = infinity
    ran("softmax", given, ROWS=1, BLOCK=block)
    torch.testing.assert_close(given["out_ptr"], torch.softmax(x, -1), equal_nan=True)
    assert given["out_ptr"][2:].isnan().all()


@pytest.mark.parametrize("block", [32, 1024])
def test_layer_norm_large_mean(block):
    """Sums of squares would lose every digit of the variance here."""
    given = inputs("layer_norm", (3, 1000))
    given["x_ptr"] += 4096
    wanted = given["x_ptr"].double().var(-1, correction=0).add(1e-5).rsqrt()
    ran("layer_norm", given, ROWS=1, BLOCK=block)
    torch.testing.assert_close(given["rstd_ptr"].double(), wanted, rtol=1e-4, atol=0)


# Of blocks of 32 queries and 16 keys, and the other way round: sequences shorter, as long, longer by one.
SEQUENCES = (1, 15, 16, 17, 32, 67)
LENGTHS = [
    ((1, 1, length, 64), torch.float32, blocks) for length in SEQUENCES for blocks in [(32, 16), (16, 32)]
]
HEADS = [((2, 3, 21, 64), torch.float16, (16, 16)), ((2, 3, 21, 128), torch.float32, (16, 16))]


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(("shape", "dtype", "blocks"), LENGTHS + HEADS, ids=str)
def test_attention_lengths_and_heads(shape, dtype, blocks, causal):
    given = inputs("attention", (*shape, causal), dtype)
    check("attention", given, BLOCK_M=blocks[0], BLOCK_N=blocks[1])


@pytest.mark.parametrize("causal", [0, 1])
def test_attention_reads_nothing_past_the_sequence(causal):
    """Heads side by side in memory, as a projection leaves them, with NaN after each sequence."""
    given = inputs("attention", (2, 3, 37, 64, causal))
    for name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr"):
        memory = torch.full((2, 50, 3, 64), float("nan"))
        memory[:, :37] = given[name].transpose(1, 2)
        given[name] = memory[:, :37].transpose(1, 2)
        given |= {f"stride_{name[0]}{axis}": given[name].stride(i) for i, axis in enumerate("bhs")}
    check("attention", given, BLOCK_M=16, BLOCK_N=16)
    assert memory[:, 37:].isnan().all()


def test_attention_of_large_scores():
    given = inputs("attention", (1, 1, 37, 64, 1))
    given["q_ptr"] *= 100  # a softmax of one element or two
    check("attention", given, largest=800, BLOCK_M=16, BLOCK_N=16)


@pytest.mark.parametrize("name", SUBJECTS)
def test_configs_differ_and_are_in_space(name):
    subject = SUBJECTS[name]
    listed = {str(config) for config in subject.configs}
    assert 20 <= len(listed) == len(subject.configs) <= 40
    space = {str(config) for config in configs_of(subject.parameters, subject.where)}
    assert listed < space
    assert set(subject.key) <= set(subject.kernel.arg_names)


_STAGED = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}


@pytest.mark.parametrize(
    ("where", "space", "refused"),
    [
        (row_tile_fits, ROW_SPACE, {"ROWS": 8, "BLOCK": 32768, "num_warps": 1}),
        (row_tile_fits, ROW_SPACE, {"ROWS": 1, "BLOCK": 256, "num_warps": 32}),
        (attention_tile_fits, ATTENTION_SPACE, _STAGED | {"BLOCK_M": 64}),
        (attention_tile_fits, ATTENTION_SPACE, _STAGED | {"num_stages": 5}),
    ],
)
def test_where_refuses(where, space, refused):
    assert all(value in space[name] for name, value in refused.items())
    assert where is row_tile_fits or where(_STAGED)
    assert not where(refused)
