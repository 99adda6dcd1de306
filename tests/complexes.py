"""What a product of complex matrices should be, and how far from it rounding may end.

By four real products each part is one sum of 2 K products of real numbers, and has the bound of such a
product, element by element: see `tests.reference`.

By three (P = re re', Q = im im', S = (re + im)(re' + im')) the real part, P - Q, has the same. The imaginary
part, S - P - Q, errs by what all three err, each within its own bound, by the rounding of both sums (half a
step of each factor of S, so one of |S|) and by that of two additions: three steps of (|re| + |im|) (|re'| +
|im'|) for all of these. Where parts cancel this is no bound relative to the imaginary part itself.
"""

import torch

from tests.reference import Sides, assert_product, assert_within, product64, tolerance


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Random complex numbers, both parts normal."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Real and imaginary parts, conjugated and negated where x is, in memory of their own."""
    whole = x.resolve_conj().resolve_neg()
    return whole.real.clone(), whole.imag.clone()


def matrices(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of a product as matrices, where they are vectors."""
    return (a.unsqueeze(0) if a.ndim == 1 else a), (b.unsqueeze(1) if b.ndim == 1 else b)


def assert_complex(
    got: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    precision: str = "ieee",
    *,
    tensor_cores: bool | None = None,
) -> None:
    """The product of two finite complex tensors, within its bound."""
    assert got.dtype == a.dtype
    assert got.shape == torch.empty(a.shape, device="meta").matmul(torch.empty(b.shape, device="meta")).shape
    on_cores = got.is_cuda if tensor_cores is None else tensor_cores
    real, by_three = precision.removesuffix("-3m"), precision.endswith("-3m")
    a, b = matrices(a, b)
    (a_re, a_im), (b_re, b_im), (re, im) = parts(a), parts(b), parts(got)
    rows = torch.cat([a_re, a_im], -1)
    re = re.reshape(torch.matmul(a.abs(), b.abs()).shape)
    im = im.reshape(re.shape)
    assert_product(re, rows, torch.cat([b_re, -b_im], -2), real, tensor_cores=on_cores)
    if not by_three:
        assert_product(im, rows, torch.cat([b_im, b_re], -2), real, tensor_cores=on_cores)
        return
    wanted = rows.double() @ torch.cat([b_im, b_re], -2).double()
    sums = a_re.abs() + a_im.abs(), b_re.abs() + b_im.abs()
    pairs = (sums, (a_re, b_re), (a_im, b_im))
    bound = sum(tolerance(x, y, re.dtype, real, on_cores) for x, y in pairs)
    bound = bound + 3 * torch.finfo(re.dtype).eps * (sums[0].double() @ sums[1].double())
    assert bool(((im.double() - wanted).abs() <= bound).all())  # NaN is out of bounds too


def _times(number: complex, z: torch.Tensor, errors: tuple, eps: float):
    """number * z, and what its parts err by, z's parts erring by `errors`.

    Each part is a sum of two products, which are rounded, as the number's parts and the sum are: by half an
    eps of the magnitudes each. In complex128 the number is exact, and the reference errs as much again.
    """
    re, im = abs(complex(number).real), abs(complex(number).imag)
    of_re, of_im = errors
    magnitudes = re * z.real.abs() + im * z.imag.abs(), re * z.imag.abs() + im * z.real.abs()
    passed = re * of_re + im * of_im, re * of_im + im * of_re
    found = tuple(error + 2 * eps * size for error, size in zip(passed, magnitudes, strict=True))
    return number * z, found


def assert_complex_fused(
    got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sides: Sides, precision: str = "ieee"
) -> None:
    """alpha * (a @ b) + beta * bias + residual of finite complex tensors, by four products, within its bound.

    A number of 1 multiplies nothing. An addition errs by half an eps of each part of its result, and so may
    that of the reference.
    """
    assert got.dtype == a.dtype
    (a_re, a_im), (b_re, b_im) = parts(a), parts(b)
    rest = (got.real.dtype, precision, got.is_cuda)
    rows = torch.cat([a_re, a_im], -1)
    sums, errors = [], []
    for columns in (torch.cat([b_re, -b_im], -2), torch.cat([b_im, b_re], -2)):
        sums.append(product64(rows, columns))
        errors.append(tolerance(rows, columns, *rest))
    eps, wanted, bound = torch.finfo(got.dtype).eps, torch.complex(*sums), tuple(errors)
    if sides.alpha != 1:
        wanted, bound = _times(sides.alpha, wanted, bound, eps)
    terms = [(sides.bias, sides.beta), (sides.residual, 1)]
    for term, weight in ((t.to(torch.complex128), w) for t, w in terms if t is not None and w != 0):
        added, more = (term, (0.0, 0.0)) if weight == 1 else _times(weight, term, (0.0, 0.0), eps)
        wanted = wanted + added
        bound = tuple(
            error + of_term + eps * part.abs()
            for error, of_term, part in zip(bound, more, parts(wanted), strict=True)
        )
    for part, right, error in zip(parts(got), parts(wanted), bound, strict=True):
        assert_within(part, right, error)
