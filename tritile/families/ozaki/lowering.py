"""Make fp64 products on int8 tensor cores, by the Chinese remainder theorem: "Ozaki scheme II".

Rows of a and columns of b are scaled by powers of two and rounded to integers, whose remainders modulo 14
small numbers are int8. The 14 int8 products of these, a single batched one, are exact; reduced to remainders
as they are stored, they tell the product of the integers, which is put together and scaled back. What is
lost is what the integers lost:

    |out - a b| <= 2^-53 (|a b| + sqrt(K) |row of a| |column of b|)

for each element, in Euclidean norms. Derivation: an integer vector has a norm S of sqrt(REACH) = 2^54.68 at
most and half that at the least, and each element is off by 1/2. By Cauchy and Schwarz a product of two such
is off by sqrt(K) (|x| + |y|) / 2, at most 2 sqrt(K) / S < 0.63 * 2^-53 sqrt(K) of |x| |y|; what this leaves
holds terms of the second order and the last rounding. S and the number of moduli are the same for every K.

Plain fp64 errs by up to K 2^-53 of the sum of magnitudes |a_ik b_kj|, typically by its square root; where
elements of a row are alike that sum is near |row| |column|. Elements far smaller than the rest of their row
keep fewer digits here. So rows and columns whose root mean square is above PEAK times their mean magnitude,
zeros not counted, are left to plain fp64, with those that have an infinity or NaN: kernels find them and
multiply them, without a word to the host.

Sources: Ozaki, Uchino, Imamura, arXiv 2504.08009; Uchino, Ozaki, Imamura, arXiv 2508.03984.
"""

from math import prod
from typing import Final, NamedTuple

from tritile.core.problem.epilogue import REMAINDER
from tritile.core.problem.moduli import MODULI, RANGE, REACH
from tritile.core.views import Fused, MatmulCall, Placed, View
from tritile.families.common.fused import extra
from tritile.families.common.grids import grid
from tritile.families.common.lowered import Lowered
from tritile.families.common.work import Buffer, Kernel, Section, Step, buffer_of

join_residues: Final = Kernel("tritile.families.ozaki.kernel", "join_residues")
measure_vectors: Final = Kernel("tritile.families.ozaki.kernel", "measure_vectors")
multiply_unfit: Final = Kernel("tritile.families.ozaki.kernel", "multiply_unfit")
split_residues: Final = Kernel("tritile.families.ozaki.kernel", "split_residues")

_PEAK: Final = 4  # normal numbers have 1.25, log-normal ones of sigma 1.5 have 3.1
_PART: Final = 41  # bits: with a remainder's 8, and 4 for a sum of 14, they make 53

# Tiles and their warps: for vectors with contiguous elements, and for others.
_MEASURED: Final = {True: (4, 512, 4), False: (16, 128, 4)}
_SPLIT: Final = {True: (8, 128, 4), False: (32, 64, 8)}
_JOINED: Final = (8, 128, 4)
_PLAIN: Final = (64, 64, 16, 8)


def _nearest(value: int, modulus: int) -> int:
    return (value + modulus // 2) % modulus - modulus // 2


def _apart(value: int) -> tuple[float, float, float]:
    """Return a number below RANGE as a sum of three, of at most `_PART` bits, cut at fixed bits."""
    high = RANGE.bit_length() - _PART
    middle = high - _PART
    parts = value >> high << high, value % (1 << high) >> middle << middle, value % (1 << middle)
    return float(parts[0]), float(parts[1]), float(parts[2])


# What kernels take: see `split_residues` and `join_residues`.
DIGITS: Final = tuple((p, *(_nearest(1 << bits, p) for bits in (16, 32, 48))) for p in MODULI)
WEIGHTS: Final = tuple(_apart(RANGE // p * pow(RANGE // p, -1, p)) for p in MODULI)
WHOLE: Final = (float(RANGE), *_apart(RANGE))


class _Vectors(NamedTuple):
    """Describe the rows of a, or the columns of b: matrices of `size` vectors of `depth` elements.

    `source`: their memory. `exponents` and `residues`, their remainders, are buffers.
    """

    source: Buffer
    exponents: str
    residues: str
    size: int
    depth: int
    strides: tuple[int, int]
    batch_shape: tuple[int, ...]
    batch_strides: tuple[int, ...]

    @property
    def matrices(self) -> int:
        return prod(self.batch_shape)

    @property
    def padded(self) -> int:
        """Return remainders from one vector to the next: whole units of 16 bytes."""
        return -(-self.depth // 16) * 16

    @property
    def plane(self) -> int:
        return self.matrices * self.size * self.padded

    @property
    def scratch(self) -> dict[str, Section]:
        exponents = Section("int32", self.matrices * self.size)
        return {self.exponents: exponents, self.residues: Section("int8", len(MODULI) * self.plane)}

    def view(self, rank: int) -> View:
        """Return the remainders as an operand. Its batch: moduli and, if `rank` is 2, the call's matrices."""
        steps = (self.plane, self.plane // self.matrices if self.matrices > 1 else 0)
        placed = Placed(self.residues, "int8")
        return View(placed, (self.size, self.padded), (self.padded, 1), steps[:rank], 1)


def _vectors(call: MatmulCall, view: View, side: str) -> _Vectors:
    shared = not any(view.batch_strides)
    batch = ((1,), (0,)) if shared else (call.batch_shape, view.batch_strides)
    names = f"exponents_of_{side}", f"residues_of_{side}"
    return _Vectors(buffer_of(view.tensor, side), *names, *view.shape, view.strides, *batch)


def _fitting(most: int, extent: int) -> int:
    """Return the size of a block: at most so many elements, and no more than there are."""
    return min(most, max(16, 1 << (extent - 1).bit_length()))


def _made_over(vectors: _Vectors, moduli: str | None) -> tuple[Step, Step]:
    """Return the launches that find the scales of vectors, and that make remainders of the scaled ones.

    `moduli`: the buffer to which the moduli are written, or None.
    """
    of = {
        "x_ptr": vectors.source, "exponents_ptr": Buffer(vectors.exponents),
        "R": vectors.size, "K": vectors.depth,
        "stride_r": vectors.strides[0], "stride_k": vectors.strides[1], "matrices": vectors.matrices,
        "batch_shape": vectors.batch_shape, "batch_strides": vectors.batch_strides,
    }  # fmt: skip
    contiguous = vectors.strides[1] == 1
    rows, most, warps = _MEASURED[contiguous]
    measure = Step(
        measure_vectors.jitted,
        grid(-(-vectors.size // rows), vectors.matrices),
        of | {
            "REACH": float(REACH), "PEAK": _PEAK, "BLOCK_R": rows, "BLOCK_K": _fitting(most, vectors.depth),
        },
        {"num_warps": warps},
    )  # fmt: skip
    rows, columns, warps = _SPLIT[contiguous]
    tiles = -(-vectors.size // rows) * -(-vectors.padded // columns)
    split = Step(
        split_residues.jitted,
        grid(tiles, vectors.matrices),
        of | {
            "out_ptr": Buffer(vectors.residues), "moduli_ptr": None if moduli is None else Buffer(moduli),
            "K_PADDED": vectors.padded, "stride_part": vectors.plane,
            "DIGITS": DIGITS, "BLOCK_R": rows, "BLOCK_K": columns,
        },
        {"num_warps": warps},
    )  # fmt: skip
    return measure, split


def _product(call: MatmulCall, a: _Vectors, b: _Vectors, parts: str, moduli: str) -> MatmulCall:
    """Return the int8 product of all remainders, reduced to remainders, in buffer `parts`, rows aligned."""
    matrices = prod(call.batch_shape)
    batch = (len(MODULI), matrices) if matrices > 1 else (len(MODULI),)
    rank, shape, stride = len(batch), (a.size, b.size), -(-b.size // 16) * 16
    steps = (matrices * a.size * stride, a.size * stride)[:rank]
    out = View(Placed(parts, "int8"), shape, (stride, 1), steps, 1)
    modulus = View(Placed(moduli, "float32"), shape, (0, 0), (1, 0)[:rank], 4)
    reduced = Fused(scale_a=modulus, activation=REMAINDER)
    turned = b.view(rank).transposed
    return MatmulCall(a.view(rank), turned, out, batch, "int8", "int8", "ieee", reduced)


def wanted(call: MatmulCall) -> bool:
    return call.precision == "ozaki"


def lowered(call: MatmulCall, early: bool) -> Lowered:
    """Return the launches and the int8 product that an fp64 product, of K up to MAX_DEPTH, becomes."""
    a, b = _vectors(call, call.a, "a"), _vectors(call, call.b.transposed, "b")
    parts, moduli = "residues", "moduli"
    core = _product(call, a, b, parts, moduli)
    batch_shape, matrices = call.batch_shape or (1,), prod(call.batch_shape)
    steps_a, steps_b, steps_out = (v.batch_strides or (0,) for v in (call.a, call.b, call.out))
    common = {
        "a_exponents_ptr": Buffer(a.exponents), "b_exponents_ptr": Buffer(b.exponents),
        "out_ptr": buffer_of(call.out.tensor, "out"), "M": a.size, "N": b.size,
        "stride_om": call.out.strides[0], "stride_on": call.out.strides[1],
        "matrices": matrices, "a_matrices": a.matrices, "b_matrices": b.matrices,
        "batch_shape": batch_shape, "out_batch_strides": steps_out,
        "extra": extra(call.fused, len(batch_shape), call.dtype), "EPILOGUE": call.fused.epilogue.constants,
    }  # fmt: skip

    def tiles(rows: int, columns: int) -> tuple[int, int, int]:
        return grid(-(-a.size // rows) * -(-b.size // columns), matrices)

    rows, columns, warps = _JOINED
    join = Step(
        join_residues.jitted,
        tiles(rows, columns),
        common | {
            "parts_ptr": Buffer(parts),
            "stride_part": core.out.batch_strides[0], "stride_pm": core.out.strides[0],
            "WEIGHTS": WEIGHTS, "RANGE": WHOLE, "BLOCK_M": rows, "BLOCK_N": columns,
        },
        {"num_warps": warps},
    )  # fmt: skip
    rows, columns, block_k, warps = _PLAIN
    plain = Step(
        multiply_unfit.jitted,
        tiles(rows, columns),
        common | {
            "a_ptr": a.source, "b_ptr": b.source, "K": a.depth,
            "stride_am": call.a.strides[0], "stride_ak": call.a.strides[1],
            "stride_bk": call.b.strides[0], "stride_bn": call.b.strides[1],
            "a_batch_strides": steps_a, "b_batch_strides": steps_b,
            "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": block_k,
        },
        {"num_warps": warps, "num_stages": 3},
    )  # fmt: skip
    reduced = Section("int8", len(MODULI) * core.out.batch_strides[0])
    scratch = {**a.scratch, **b.scratch, parts: reduced, moduli: Section("float32", len(MODULI))}
    return Lowered((*_made_over(a, moduli), *_made_over(b, None)), core, (join, plain), scratch)
