"""What a product of complex matrices should be, and how far from it rounding may end.

By four real products each part is one sum of 2 K products of real numbers, and has the bound of such a
product, element by element: see `tests.reference`.

By three (P = re re', Q = im im', S = (re + im)(re' + im')) the real part, P - Q, has the same. The imaginary
part, S - P - Q, errs by what all three err, each within its own bound, by the rounding of both sums (half a
step of each factor of S, so one of |S|) and by that of two additions: three steps of (|re| + |im|) (|re'| +
|im'|) for all of these. Where parts cancel this is no bound relative to the imaginary part itself.
"""

import torch

from tests.reference import assert_product, tolerance


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
