"""permute, transpose and contiguous, interpreted: every dtype, shape and layout, bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tritile
from tests.configs import turned
from tests.reference import (
    COMPLEX,
    DTYPES,
    LAYOUTS,
    SIGN_BYTES,
    bytes_of,
    frame,
    guard_intact,
    name,
    placed,
    random_bits,
    same_bits,
    values,
)
from tritile.core.device import TARGETS
from tritile.errors import TuningError
from tritile.families.permute.family import in_place
from tritile.families.space import illegal
from tritile.families.work import pieces_of
from tritile.ops import call as ops_call
from tritile.ops import permute as permute_op
from tritile.runtime import launch

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_every_dtype_bit_for_bit(dtype):
    for shape in ((1, 1), (37, 53), (64, 16), (1, 19), (23, 1)):
        raw, x = random_bits(shape, dtype)
        got = tritile.transpose(x)
        assert (got.dtype, tuple(got.shape), got.is_contiguous()) == (dtype, shape[::-1], True)
        assert same_bits(got, raw.transpose(0, 1)), shape


def conjugated(raw, dtype):
    """The sign bit of each imaginary part turned over, by hand."""
    raw = raw.clone()
    raw[..., -1] ^= 128
    return raw


def negated(raw, dtype):
    raw = conjugated(raw, dtype)
    raw[..., SIGN_BYTES[dtype] - 1] ^= 128
    return raw


@pytest.mark.parametrize("dtype", COMPLEX, ids=name)
def test_lazy_conjugation_and_negation(dtype):
    raw, x = random_bits((13, 21), dtype)
    cases = (
        (x.conj(), conjugated(raw, dtype)),
        (torch._neg_view(x), negated(raw, dtype)),
        (torch._neg_view(x.conj()), negated(conjugated(raw, dtype), dtype)),
    )
    for lazy, expected in cases:
        assert same_bits(tritile.transpose(lazy), expected.transpose(0, 1))
        assert same_bits(tritile.transpose(lazy.mT), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128], ids=name)
def test_out_is_filled_and_nothing_around_it(dtype):
    raw, x = random_bits((2, 19, 33), dtype)
    for layout in ("row", "column_sliced", "sparse", "offset"):
        buffer, out = frame((2, 33, 19), dtype, layout)
        assert tritile.transpose(x, out=out) is out
        assert same_bits(out, raw.transpose(1, 2))
        assert guard_intact(buffer, out)


def test_out_and_input_may_interleave():
    buffer = values((9, 24), torch.float32)
    before = buffer.clone()
    tritile.transpose(buffer[:, :9], out=buffer[:, 10:19])
    assert torch.equal(buffer[:, 10:19], before[:, :9].mT)
    buffer[:, 10:19] = before[:, 10:19]
    assert torch.equal(buffer, before)


BLOCKS = [(1, 512, 1), (512, 1, 8), (16, 32, 1), (32, 16, 32), (4, 256, 8), (32, 64, 8)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128], ids=name)
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_every_legal_config_gives_the_answer(blocks, dtype):
    config = turned(*blocks[:2], group=blocks[2])
    raw, x = random_bits((2, 19, 37), dtype)
    out = torch.empty(2, 37, 19, dtype=dtype)
    call = permute_op.permute_call(x, out, [0, 2, 1])
    assert illegal(config, call.problem, TARGETS["sm_90"]) is None
    launch.run_interpreted(call, config)
    assert same_bits(out, raw.transpose(1, 2))


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.complex64], ids=name)
def test_elements_side_by_side_move_as_wider_words(offset, dtype):
    for inner in (2, 4, 6, 8, 32):
        raw, flat = random_bits((offset + 5 * 7 * inner,), dtype)
        x, bits = flat[offset:].view(5, 7, inner), raw[offset:].view(5, 7, inner, -1)
        assert same_bits(tritile.transpose(x, 0, 1), bits.transpose(0, 1))
        wide = permute_op.permute_call(x, torch.empty(7, 5, inner, dtype=dtype), [1, 0, 2]).problem.itemsize
        fits = dtype.itemsize < 8 and not offset % 2 and inner * dtype.itemsize <= 64
        assert (wide > dtype.itemsize) == fits


def test_contiguous_is_the_tensor_itself_where_it_is_contiguous():
    x = values((5, 6, 7), torch.float32)
    assert tritile.contiguous(x) is x
    for view in (x[:, ::2], x.mT, x[:1].expand(4, 6, 7), x[:, :, 3]):
        got = tritile.contiguous(view)
        assert got.is_contiguous()
        assert torch.equal(got, view)
    conjugate = values((3, 4), torch.complex64).conj()
    assert torch.equal(bytes_of(tritile.contiguous(conjugate)), bytes_of(conjugate.resolve_conj()))
    vector, leaf = values((7,), torch.float32), torch.zeros(3, 4, requires_grad=True)
    assert tritile.permute(vector, (0,)).data_ptr() != vector.data_ptr()
    assert tritile.contiguous(leaf) is leaf
    tritile.contiguous(leaf.mT)[1].sum().backward()
    assert torch.equal(leaf.grad, torch.eye(4)[1].expand(3, 4))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64, torch.complex128], ids=name)
def test_square_matrices_in_place(size, dtype):
    raw, x = random_bits((size, size), dtype)
    raw = raw.clone()
    assert tritile.transpose(x, out=x) is x
    assert same_bits(x, raw.transpose(0, 1))


@st.composite
def permutations(draw):
    few, many = st.lists(st.integers(1, 7), min_size=2, max_size=4), st.integers(1, 4)
    shape = tuple(draw(few | st.lists(many, min_size=5, max_size=6)))
    dims = tuple(draw(st.permutations(range(len(shape)))))
    x_layout = draw(st.sampled_from(LAYOUTS))
    return shape, dims, draw(st.sampled_from(DTYPES)), x_layout, draw(st.permutations(range(len(shape))))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(permutations(), st.integers(0, 2**16))
def test_any_permutation_of_any_permuted_view(case, seed):
    shape, dims, dtype, layout, lies = case
    raw, x = random_bits(shape, dtype, seed)
    x = placed(x, layout).permute(*lies)
    expected = raw.permute(*lies, len(shape)).permute(*dims, len(shape))
    assert same_bits(tritile.permute(x, dims), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.complex128], ids=name)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_batches_too_large_for_one_launch_are_split(monkeypatch, dtype, most):
    raw, flat = random_bits((3 + 5 * 80 * 70,), dtype)
    x, bits = flat[3:].view(5, 80, 70), raw[3:].view(5, 80, 70, -1)
    out = torch.empty(5, 70, 80, dtype=dtype)
    call = permute_op.permute_call(x, out, [0, 2, 1])
    assert call.batch_shape == (5,)
    config = turned(128, 128)
    monkeypatch.setattr("tritile.families.work._MAX_PROGRAMS", most)
    pieces = [piece for piece, _ in pieces_of(call, config, TARGETS["nvidia-h200"])]
    assert (len(pieces) > 1) == (most < 5)
    for piece in pieces:
        launch.run_interpreted(piece, config)
    assert same_bits(out, bits.transpose(1, 2))


def test_in_place_only_what_is_not_exchanged_is_split(monkeypatch):
    buffer = values((2, 3, 40), torch.float32)
    x, before = buffer[:, :2], buffer[:, :2].clone()
    call = permute_op.permute_call(x, x, [1, 0, 2])
    monkeypatch.setattr("tritile.families.work._MAX_PROGRAMS", 8)
    for piece, _ in pieces_of(call, in_place(call.problem), TARGETS["nvidia-h200"]):
        launch.run_interpreted(piece, in_place(call.problem))
    assert torch.equal(x, before.transpose(0, 1))
    square = torch.zeros(200, 200)
    call = permute_op.permute_call(square, square, [1, 0])
    with pytest.raises(TuningError, match="more programs than a launch counts"):
        pieces_of(call, in_place(call.problem), TARGETS["nvidia-h200"])


def test_what_is_done_in_place_is_never_measured(monkeypatch):
    monkeypatch.setattr("tritile.tune.now.tuned_now", None)
    x = values((70, 70), torch.float32)
    before = x.clone()
    for mode in ("tune", "strict", "off"):
        with tritile.mode(mode):
            tritile.transpose(x, out=x)
    assert torch.equal(x, before.mT)
    call = permute_op.permute_call(x, x, [1, 0])
    assert ops_call.fixed(call) == in_place(call.problem)
    assert ops_call.fixed(permute_op.permute_call(x, before, [1, 0])) is None
    for device in (None, TARGETS["nvidia-h200"]):
        assert tritile.plan(tritile.transpose, x, out=x, device=device).config == ops_call.fixed(call)
