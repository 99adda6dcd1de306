"""What the answer should be, how far from it rounding may end, and tensors laid out in awkward ways.

The bound of `assert_product`, for each element of a product over K:

    u_out * |ref|  +  (growth(K) * eps_acc + input error) * (|a| @ |b|)  +  half the smallest step of out

The first part is the one rounding to the output's type. Sums of K products in arithmetic of step
eps_acc err by a random walk, sqrt(K) * eps_acc / 2 of |a| @ |b|, times a factor of 8, which no walk of
these tests leaves by chance. Tensor cores truncate instead, which is a drift: one step for each
instruction, which takes at least 8 of K. A term left out, or one too many, moves an element by about
(|a| @ |b|) / K, well above the bound for every K below 2,000.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MATMUL_DTYPES = (*FLOATS, torch.int8, *FP8)
LAYOUTS = ("row", "column", "sliced", "column_sliced", "strided", "sparse", "offset")
_NAMES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
DTYPES = [getattr(torch, name) for name in _NAMES if hasattr(torch, name)]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
# Bytes of each part of a complex number, the last of which holds its sign.
SIGN_BYTES = {torch.complex32: 2, torch.complex64: 4, torch.complex128: 8}
DEFAULT_OUT = {torch.int8: torch.int32} | dict.fromkeys(FP8, torch.bfloat16)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, which torch copies and fills as bits whatever they stand for."""
    size = tensor.element_size()
    tensor = torch.view_as_real(tensor) if size == 16 else tensor
    return tensor.view((torch.int8, torch.int16, torch.int32, torch.int64)[min(size, 8).bit_length() - 1])


def name(dtype: torch.dtype) -> str:
    """The dtype's name without "torch.", for the names of tests."""
    return str(dtype).removeprefix("torch.")


def random_bits(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bits as bytes, a last dimension longer than the tensor they are, and as that tensor."""
    size = torch.zeros((), dtype=dtype).element_size()
    generator = torch.Generator(device).manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, most, (*shape, size), dtype=torch.uint8, device=device, generator=generator)
    return raw, raw.view(dtype).squeeze(-1)


def same_bits(got: torch.Tensor, raw: torch.Tensor) -> bool:
    """Whether a tensor is, bit for bit, what these bytes say."""
    return torch.equal(bytes_of(got), raw.contiguous().reshape(-1))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, for comparisons that tell -0.0 from 0.0 and one NaN from another."""
    return words_of(tensor).reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Memory full of NaN (of -1 for integers), which nothing right is made of."""
    size = torch.empty((), dtype=dtype).element_size() * math.prod(shape)
    return torch.full((size,), 255, dtype=torch.uint8, device=device).view(dtype).view(shape)


def poison_empty(monkeypatch) -> None:
    """Let torch.empty give poisoned memory, so that an element never written shows."""
    original = torch.empty

    def empty(*args, **kwargs) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        if tensor.numel() and tensor.is_contiguous() and tensor.device.type != "meta":
            tensor.reshape(-1).view(torch.uint8).fill_(255)
        return tensor

    monkeypatch.setattr(torch, "empty", empty)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Random numbers of both signs: normal ones, or every int8."""
    generator = torch.Generator(device).manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, device=device, generator=generator)
    wide = dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
    return torch.randn(shape, dtype=wide, device=device, generator=generator).to(dtype)


def frame(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned buffer, and a view of this shape in it, laid out as `layout` says."""
    *batch, rows, columns = shape
    if layout.startswith("column"):
        rest = layout.removeprefix("column_") if "_" in layout else "row"
        buffer, view = frame((*batch, columns, rows), dtype, rest, device)
        return buffer, view.mT
    if layout == "offset":
        buffer = poisoned((1 + math.prod(shape) + 3,), dtype, device)
        return buffer, buffer[1 : 1 + math.prod(shape)].view(shape)
    if layout == "padded":  # rows start on 16 bytes, wherever they end
        unit = max(1, 16 // dtype.itemsize)
        buffer = poisoned((*batch, rows + 2, (-(-columns // unit) + 2) * unit), dtype, device)
        return buffer, buffer[..., 1 : rows + 1, unit : unit + columns]
    if layout == "sliced":
        buffer = poisoned((*batch, rows + 3, columns + 5), dtype, device)
        return buffer, buffer[..., 1 : rows + 1, 2 : columns + 2]
    if layout == "strided":
        buffer = poisoned((*batch, rows, 2 * columns + 1), dtype, device)
        return buffer, buffer[..., 1::2][..., :columns]
    if layout == "sparse":
        buffer = poisoned((*batch, 2 * rows, 3 * columns), dtype, device)
        return buffer, buffer[..., ::2, ::3]
    buffer = poisoned(shape, dtype, device)
    return buffer, buffer


def placed(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, laid out in memory whose other elements are poison."""
    _, view = frame(tuple(tensor.shape), tensor.dtype, layout, str(tensor.device))
    words_of(view).copy_(words_of(tensor))
    return view


def at_offset(
    offset: int, n: int, k: int, dtype: torch.dtype, row: int | None = None, device: str = "cpu"
) -> torch.Tensor:
    """b [k, n], contiguous along K, from `offset` elements after a word on, rows `row` apart, amid NaN."""
    row = k if row is None else row
    buffer = poisoned((64 + n * row,), dtype, device)
    first = -(buffer.data_ptr() // dtype.itemsize) % 16 + 16 + offset
    b = buffer[first:].as_strided((n, k), (row, 1))
    b.copy_(values((n, k), dtype, 1, device))
    return b.mT


def guard_intact(buffer: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether all of the buffer outside of the view is still poison. Overwrites the view."""
    words_of(view).fill_(-1)
    return bool((bytes_of(buffer) == 255).all())


def product64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in float64, of integers exact."""
    return torch.matmul(a.double(), b.double())


def summing_error(
    a: torch.Tensor, b: torch.Tensor, precision: str, tensor_cores: bool, fp8: bool = False
) -> torch.Tensor:
    """What sums may err by, the middle part of the bound; of factors that stand for `fp8` ones, too."""
    k = max(1, a.shape[-1])
    eps_acc = torch.finfo(torch.float64 if a.dtype == torch.float64 else torch.float32).eps
    growth = 4 * math.sqrt(k)
    inputs = 2.0**-10 + 2.0**-22 if precision == "tf32" else 0.0  # each factor is rounded to 11 bits
    if tensor_cores:
        growth += k / 8
        # fp8 sums keep 13 bits for at most 256 of K, in instructions of 32
        inputs += 256 / 32 * 2.0**-13 if fp8 or a.dtype in FP8 else 0.0
    return (growth * eps_acc + inputs) * product64(a.double().abs(), b.double().abs())


def assert_complex(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, precision: str = "ieee") -> None:
    """The product of two finite complex matrices: each part is one of 2 K real terms, within its bound."""
    a, b = a.resolve_conj(), b.resolve_conj()
    rows = torch.cat([a.real, a.imag], -1)
    assert_product(got.real, rows, torch.cat([b.real, -b.imag], -2), precision)
    assert_product(got.imag, rows, torch.cat([b.imag, b.real], -2), precision)


def assert_product(
    got: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    precision: str = "ieee",
    *,
    tensor_cores: bool | None = None,
    fp8: bool = False,
) -> None:
    """The product of two finite tensors, within its bound; exactly for integers."""
    expected = product64(a, b)
    if a.dtype == torch.int8:
        assert torch.equal(got.double(), expected)
        return
    on_cores = got.is_cuda if tensor_cores is None else tensor_cores
    assert_within(got, expected, summing_error(a, b, precision, on_cores, fp8))


def assert_below(error: torch.Tensor, bound: torch.Tensor) -> None:
    """Each element's error is within its bound; no element is a NaN."""
    bad = ~(error <= bound)
    if bad.any():
        worst = float((error / bound).nan_to_num(math.inf).max())
        where = bad.nonzero()[0].tolist()
        off = f"{int(bad.sum())} of {bad.numel()} elements off"
        raise AssertionError(f"{off}, the first at {where}, the worst {worst:.3g} times its bound")


class Sides(NamedTuple):
    """What is done to a product's sums, in the words of `tritile.core.epilogue.Epilogue`."""

    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    activation: str = ""
    alpha: float = 1.0
    beta: float = 1.0


ACTIVATIONS = {
    "": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def finished64(sums: torch.Tensor, error: torch.Tensor, sides: Sides, eps: float) -> tuple[torch.Tensor, ...]:
    """What an epilogue makes of sums in float64, and of a bound of their error, in arithmetic of step eps.

    Each operation errs by one eps of its result at the most, a product of scales and alpha by four together.
    An activation passes on an error up to 1.13 times (gelu's steepest slope); its own is that of exp or erf
    at x, whose argument is rounded before: of x e^-|x| (|x| + c) with c under 8, that is below 8 (|x| + 1).
    """
    scale = torch.full((), sides.alpha, dtype=torch.float64, device=sums.device)
    for side in (sides.scale_a, sides.scale_b):
        scale = scale if side is None else scale * side.double()
    wanted, error = sums * scale, error * scale.abs()
    error = error + 4 * eps * wanted.abs()
    if sides.bias is not None and sides.beta != 0:
        added = sides.beta * sides.bias.double()
        wanted = wanted + added
        error = error + eps * (added.abs() + wanted.abs())
    if sides.activation:
        error = 1.13 * error + 8 * eps * (wanted.abs() + 1)
        wanted = ACTIVATIONS[sides.activation](wanted)
    if sides.residual is not None:
        wanted = wanted + sides.residual.double()
        error = error + eps * wanted.abs()
    return wanted, error


def assert_gated(
    got: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str = "silu",
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    precision: str = "ieee",
    *,
    tensor_cores: bool | None = None,
) -> None:
    """activation(x @ gate + bias_gate) * (x @ up + bias_up), gate and up being K x N.

    A product of two factors errs by each one's error times the other, by both errors' product, and by the
    rounding of the multiplication.
    """
    on_cores = got.is_cuda if tensor_cores is None else tensor_cores
    factors = []
    for weight, sides in ((gate, Sides(bias=bias_gate, activation=activation)), (up, Sides(bias=bias_up))):
        sums, error, eps = sums64(x, weight, precision, on_cores)
        factors.append(finished64(sums, error, sides, eps))
    (left, of_left), (right, of_right) = factors
    wanted = left * right
    error = of_left * right.abs() + of_right * left.abs() + of_left * of_right + eps * wanted.abs()
    assert_within(got, wanted, error)


def assert_within(got: torch.Tensor, wanted: torch.Tensor, error: torch.Tensor) -> None:
    """Equal to what is wanted, but for this error and rounding to got's type; no element is a NaN."""
    assert got.shape == wanted.shape
    facts = torch.finfo(got.dtype)
    bound = error + facts.eps / 2 * wanted.abs() + facts.smallest_normal * facts.eps
    assert_below((got.double() - wanted).abs(), bound)


def sums64(
    a: torch.Tensor, b: torch.Tensor, precision: str, tensor_cores: bool
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A product in float64, what its sums may err by, and the step of the arithmetic that follows them."""
    eps = torch.finfo(torch.float64 if a.dtype == torch.float64 else torch.float32).eps
    sums = product64(a, b)
    error = eps / 2 * sums.abs()
    # Sums of int8 are exact, and then rounded to fp32.
    exact = a.dtype == torch.int8
    return sums, error if exact else error + summing_error(a, b, precision, tensor_cores), eps


def assert_fused(
    got: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    sides: Sides,
    precision: str = "ieee",
    *,
    tensor_cores: bool | None = None,
) -> None:
    """The product of two finite tensors with its epilogue, within the bound of both."""
    on_cores = got.is_cuda if tensor_cores is None else tensor_cores
    sums, error, eps = sums64(a, b, precision, on_cores)
    assert_within(got, *finished64(sums, error, sides, eps))
