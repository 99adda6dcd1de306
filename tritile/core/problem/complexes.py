"""Decide how a product of complex matrices is made of one real product.

By four products: a complex number x stands for the 2 x 2 real matrix [re, im; -im, re]. A row of complex
numbers in memory is a row of twice as many real ones. So A as it lies (M x 2K), times B with each element
made a 2 x 2 matrix (2K x 2N), is the result as it lies (M x 2N). If A is much smaller, A is transformed
instead, and B is read once as it lies: A becomes two planes above each other, one that gives the real parts
and one that gives the imaginary parts, and the result comes in planes that are put together afterwards.

By three products ("3m" in the BLAS): with P = re re', Q = im im' and S = (re + im)(re' + im'), the result is
P - Q and S - P - Q. Both operands become planes, a batch of three products is made, and its results are put
together. That saves a quarter of the multiplications.

Errors, where a real product of K terms errs by at most g(K) |A| |B|, element by element, and u is half a
step: by four products, each part by g(2K) of its sum of absolute values, |re| |re'| + |im| |im'| and
|re| |im'| + |im| |re'|. By three, the real part by as much, the imaginary one by g(K) + 6 u of
(|re| + |im|) (|re'| + |im'|) + |re| |re'| + |im| |im'|: small beside the norms of A and B, and not always
beside itself. Source: Higham, "Stability of a Method for Multiplying Complex Matrices with Three Real Matrix
Multiplications", SIAM J. Matrix Anal. Appl. 13, 1992.
"""

from typing import Any, Final, Literal

from tritile.core.problem.checks import REAL_DTYPE, THREE

Form = Literal["embedded", "pairs", "planes", "three"]
_ROW_OF: Final = {"row": "row", "strided": "row", "column": "column"}


def moved(problem: Any) -> dict[Form, int]:
    """Return how many complex elements each way by four products moves beyond a product's own, by matrix.

    "embedded" makes each element of b a 2 x 2 matrix. "pairs" and "planes" make planes of a, where b is
    contiguous along N or along K.
    """
    a, b, out = problem.m * problem.k, problem.k * problem.n, problem.m * problem.n
    found: dict[Form, int] = {"embedded": 4 * b + 2 * a * (problem.a_layout != "row")}
    if problem.out_layout != "row":
        found["embedded"] += 2 * out
    if problem.b_layout == "column":
        found["planes"] = 4 * a + 2 * out
    else:
        found["pairs"] = 2 * a + 4 * out + 2 * b * (problem.b_layout != "row")
    return found


def form_of(problem: Any) -> Form:
    """Tell how a product of complex numbers is made: of four real products by the form that moves least.

    Each form adds up in an order of its own: one for all sizes where the product is invariant.
    """
    if problem.precision.endswith(THREE):
        return "three"
    if problem.invariant:
        return "embedded"
    found = moved(problem)
    return min(found, key=lambda form: found[form])


def core_of(problem: Any) -> dict[str, Any]:
    """Return the fields of the real product that makes this product of complex numbers."""
    form, (m, n, k) = form_of(problem), (problem.m, problem.n, problem.k)
    real = REAL_DTYPE[problem.dtype]
    core = {
        "dtype": real, "out_dtype": real, "precision": problem.precision.removesuffix(THREE),
        "a_layout": _ROW_OF[problem.a_layout], "b_layout": _ROW_OF[problem.b_layout], "out_layout": "row",
        "a_align": 16, "b_align": 16, "out_align": 16,
    }  # fmt: skip
    if form == "three":
        return core | {"batch": 3 * problem.batch}
    if form == "embedded":
        kept = {"a_align": problem.a_align} if problem.a_layout == "row" else {}
        kept |= {"out_align": problem.out_align} if problem.out_layout == "row" else {}
        return core | kept | {"n": 2 * n, "k": 2 * k}
    core |= {"m": 2 * m, "a_layout": "row"}
    core |= {"b_align": problem.b_align} if problem.b_layout != "strided" else {}
    return core | ({"k": 2 * k} if form == "planes" else {"n": 2 * n})
