"""Problem: one call, described in everything that decides which config is fast for it.

A problem is a frozen value. It names sizes, dtypes, layouts and alignments, and no tensor, so that it
can be remembered, compared and planned for on a machine without the GPU. `operands` gives shapes and
strides of tensors that pose the problem.
"""

import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, NamedTuple

from tritile.errors import InvalidValueError

ITEMSIZE: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
MATMUL_DTYPES: Final = tuple(name for name in ITEMSIZE if name != "int32")
FP8_DTYPES: Final = ("float8_e4m3fn", "float8_e5m2")
LAYOUTS: Final = ("row", "column", "strided")
ALIGNMENTS: Final = (1, 2, 4, 8, 16)
PRECISIONS: Final = ("ieee", "tf32x3", "tf32")
MAX_EXTENT: Final = 2**48
_TILE: Final = 4096  # elements that the dimensions of a tile should have


@dataclass(frozen=True)
class Operand:
    """Shape (batch, rows, columns) and strides, in elements, of one tensor of a problem."""

    dtype: str
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]

    @property
    def elements(self) -> int:
        """How many elements of memory it spans."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def _check(condition: bool, problem: Any, wanted: str) -> None:
    if not condition:
        raise InvalidValueError(f"{problem!r}: wanted {wanted}")


def _among(allowed: tuple[object, ...], *values: Any) -> bool:
    """Whether each value is one of these, of the same type: 16.0 and True are no alignments."""
    return all(any(type(v) is type(a) and v == a for a in allowed) for v in values)


def _extent(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_EXTENT


def _leading(extent: int, itemsize: int, alignment: int) -> int:
    """The smallest stride of at least `extent` elements that has just this alignment, in bytes."""
    unit = max(1, alignment // itemsize)
    stride = -(-extent // unit) * unit
    if alignment < 16 and stride * itemsize % (2 * alignment) == 0 and alignment >= itemsize:
        stride += unit
    return stride


def _operand(dtype: str, itemsize: int, layout: str, alignment: int, shape: tuple[int, int, int]) -> Operand:
    _, rows, columns = shape
    if layout == "column":
        leading = _leading(rows, itemsize, alignment)
        return Operand(dtype, shape, (leading * columns, 1, leading))
    step = 2 if layout == "strided" else 1
    leading = _leading(columns * step, itemsize, alignment)
    return Operand(dtype, shape, (leading * rows, leading, step))


@dataclass(frozen=True)
class MatmulProblem:
    """`batch` products of an m x k by a k x n matrix.

    Layouts: "row" has its last dimension contiguous, "column" its first, "strided" neither.
    Alignments: the largest power of two, at most 16, in bytes, that divides the address and every
    stride but the contiguous one. Raises InvalidValueError where a field is out of its range.
    """

    op: ClassVar[str] = "matmul"
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    a_layout: str = "row"
    b_layout: str = "row"
    out_layout: str = "row"
    a_align: int = 16
    b_align: int = 16
    out_align: int = 16
    precision: str = "ieee"

    def __post_init__(self) -> None:
        _check(all(map(_extent, (self.batch, self.m, self.n, self.k))), self, "sizes of 1 and more")
        _check(_among(MATMUL_DTYPES, self.dtype), self, f"a dtype of {', '.join(MATMUL_DTYPES)}")
        _check(_among(tuple(ITEMSIZE), self.out_dtype), self, f"an out_dtype of {', '.join(ITEMSIZE)}")
        layouts = (self.a_layout, self.b_layout, self.out_layout)
        _check(_among(LAYOUTS, *layouts), self, f"layouts of {', '.join(LAYOUTS)}")
        aligns = (self.a_align, self.b_align, self.out_align)
        _check(_among(ALIGNMENTS, *aligns), self, f"alignments of {ALIGNMENTS}")
        _check(_among(PRECISIONS, self.precision), self, f"a precision of {', '.join(PRECISIONS)}")

    @property
    def itemsize(self) -> int:
        """Bytes of an input element."""
        return ITEMSIZE[self.dtype]

    @property
    def flops(self) -> int:
        """Multiplications and additions, counted apart."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes moved if every input is read once and the output written once."""
        inputs = self.k * (self.m + self.n) * self.itemsize
        return self.batch * (inputs + self.m * self.n * ITEMSIZE[self.out_dtype])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes by which two problems of one class are near or far."""
        return (self.batch, self.m, self.n, self.k)

    @property
    def kind(self) -> tuple[Any, ...]:
        """All but the sizes: neighbours have the same."""
        layouts = (self.a_layout, self.b_layout, self.out_layout)
        aligns = (self.a_align, self.b_align, self.out_align)
        return (self.op, self.dtype, self.out_dtype, *layouts, *aligns, self.precision)

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """a, b and out: tensors that pose this problem."""
        out_size = ITEMSIZE[self.out_dtype]
        return (
            _operand(self.dtype, self.itemsize, self.a_layout, self.a_align, (self.batch, self.m, self.k)),
            _operand(self.dtype, self.itemsize, self.b_layout, self.b_align, (self.batch, self.k, self.n)),
            _operand(self.out_dtype, out_size, self.out_layout, self.out_align, (self.batch, self.m, self.n)),
        )

    @property
    def label(self) -> str:
        """A short name for a table of results."""
        batch = f"{self.batch}x" if self.batch > 1 else ""
        letters = {"row": "N", "column": "T", "strided": "S"}
        layout = letters[self.a_layout] + letters[self.b_layout]
        precision = f" {self.precision}" if self.dtype == "float32" else ""
        return f"{batch}{self.m}x{self.n}x{self.k} {layout} {self.dtype}{precision}"


def merged(
    sizes: Sequence[int], *strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The same index space with the fewest dimensions: ones dropped, neighbours merged.

    Two neighbours merge where, in every operand, stepping the outer once is stepping the inner
    through its whole size. Returns the sizes and, for each operand, its strides.
    """
    out: list[list[int]] = []  # [size, stride of operand 0, stride of operand 1, ...]
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if out and all(outer == inner * size for outer, inner in zip(out[-1][1:], steps, strict=True)):
            out[-1] = [out[-1][0] * size, *steps]
        else:
            out.append([size, *steps])
    columns = list(zip(*out, strict=True)) or [() for _ in range(1 + len(strides))]
    return tuple(columns[0]), tuple(columns[1:])


class Plane(NamedTuple):
    """The dimensions of a permutation by what becomes of them; those of m and n innermost first.

    Along `n` x is densest, along `m` out is. Either is one dimension, or several that follow each other
    without a gap in x (n) or in out (m). `batch` are the rest, outermost first.
    """

    m: tuple[int, ...]
    n: tuple[int, ...]
    batch: tuple[int, ...]


def _run(
    first: int, shape: Sequence[int], strides: Sequence[int], free: Collection[int], enough: int
) -> tuple[int, ...]:
    """`first` and the dimensions that follow it without a gap, until together they are `enough`."""
    run, size = [first], shape[first]
    while size < enough:
        reach = strides[first] * size
        following = [i for i in free if i not in run and strides[i] == reach]
        if not following:
            break
        run.append(following[0])
        size *= shape[following[0]]
    return tuple(run)


@dataclass(frozen=True)
class PermuteProblem:
    """A copy of elements of `itemsize` bytes from x to out, over one index space.

    `shape` has the dimensions of out that are left where those of size 1 are dropped and those that stay
    together merged, outermost first; strides count elements. Alignments as in `MatmulProblem`.
    Raises InvalidValueError where a field is out of its range.
    """

    op: ClassVar[str] = "permute"
    shape: tuple[int, ...]
    x_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    itemsize: int
    x_align: int = 16
    out_align: int = 16

    def __post_init__(self) -> None:
        lists = (self.shape, self.x_strides, self.out_strides)
        _check(all(isinstance(values, tuple) for values in lists), self, "shape and strides as tuples")
        _check(len({len(values) for values in lists}) == 1, self, "a stride for every dimension")
        _check(all(map(_extent, self.shape)), self, "sizes of 1 and more")
        steps = (*self.x_strides, *self.out_strides)
        _check(all(_extent(step + 1) for step in steps if type(step) is int), self, "strides from 0")
        _check(all(type(step) is int for step in steps), self, "whole strides")
        _check(_among(ALIGNMENTS, self.itemsize), self, f"an itemsize of {ALIGNMENTS}")
        _check(_among(ALIGNMENTS, self.x_align, self.out_align), self, f"alignments of {ALIGNMENTS}")

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        x_strides: Sequence[int],
        out_strides: Sequence[int],
        itemsize: int,
        addresses: tuple[int, int] = (0, 0),
        widen: bool = True,
    ) -> "PermuteProblem":
        """The problem of moving x, whose dimensions are in out's order, to out.

        `widen`: elements that always stay side by side may be moved as one of up to 8 bytes.
        """
        given = cls(tuple(shape), tuple(x_strides), tuple(out_strides), itemsize)  # checks them
        sizes, (of_x, of_out) = merged(given.shape, given.x_strides, given.out_strides)
        if widen:
            sizes, of_x, of_out, itemsize = _widened(sizes, of_x, of_out, itemsize, addresses)
        aligns = (_alignment(itemsize, at, s) for at, s in zip(addresses, (of_x, of_out), strict=True))
        return cls(sizes, of_x, of_out, itemsize, *aligns)

    @classmethod
    def turned(cls, batch: int, m: int, n: int, itemsize: int) -> "PermuteProblem":
        """A batch of contiguous m x n matrices, each transposed."""
        sizes = (batch, m, n)
        if not all(map(_extent, sizes)):
            raise InvalidValueError(f"{sizes} matrices: wanted sizes of 1 and more")
        return cls.of((batch, n, m), (m * n, 1, n), (m * n, m, 1), itemsize, widen=False)

    @functools.cached_property
    def plane(self) -> Plane:
        """Which dimensions make the tiles."""
        axes = range(len(self.shape))
        x, out = self.x_strides, self.out_strides
        dense_x = min(axes, key=lambda i: (x[i] == 0, x[i], -i), default=None)
        if dense_x is None:
            return Plane((), (), ())
        rest = sorted((i for i in axes if i != dense_x), key=lambda i: (out[i], x[i]))
        if not rest:
            return Plane((), (dense_x,), ())
        long = max(32, 256 // self.itemsize)
        both = out[dense_x] == min(
            (step for step in out if step), default=0
        )  # out is densest along the same one
        few = max(long, _TILE // self.shape[rest[0]])
        n = (dense_x,) if both else _run(dense_x, self.shape, x, rest[1:], few)
        columns = math.prod(self.shape[i] for i in n)
        free = [i for i in rest if i not in n]
        m = _run(rest[0], self.shape, out, free, max(long, _TILE // columns))
        return Plane(m, n, tuple(i for i in axes if i not in m and i not in n))

    @property
    def m(self) -> int:
        """The tile rows' extent: along it out is densest."""
        return math.prod(self.shape[i] for i in self.plane.m)

    @property
    def n(self) -> int:
        """The tile columns' extent: along it x is densest."""
        return math.prod(self.shape[i] for i in self.plane.n)

    @property
    def batch(self) -> int:
        """How many planes of m x n there are."""
        return math.prod(self.shape[i] for i in self.plane.batch)

    def _layout(self, strides: tuple[int, ...]) -> str:
        if self.plane.n and strides[self.plane.n[0]] == 1:
            return "row"
        return "column" if self.plane.m and strides[self.plane.m[0]] == 1 else "strided"

    @functools.cached_property
    def x_layout(self) -> str:
        """Along what x is contiguous: n ("row"), m ("column"), or neither."""
        return self._layout(self.x_strides)

    @functools.cached_property
    def out_layout(self) -> str:
        """The same of out."""
        return self._layout(self.out_strides)

    def runs(self, block_m: int, block_n: int) -> tuple[int, int]:
        """How many elements of a tile lie side by side in x, and in out."""
        m, n, _ = self.plane

        def run(steps: tuple[int, ...], first: tuple[int, ...], sides: tuple[int, int]) -> int:
            """From the dimensions `first` on, through all of a tile that follows without a gap."""
            if not first or steps[first[0]] != 1:
                return 1
            reach, have = 1, {}  # how many of each dimension a tile has
            for group, side in zip((m, n), sides, strict=True):
                for i in group:
                    have[i] = min(self.shape[i], max(1, side))
                    side //= self.shape[i]
            while following := [i for i in have if steps[i] == reach]:
                reach *= have[following[0]]
                if have[following[0]] < self.shape[following[0]]:
                    break
            return reach

        sides = (min(block_m, self.m), min(block_n, self.n))
        out = m if self.out_layout == "column" else n
        return run(self.x_strides, n, sides), run(self.out_strides, out, sides)

    @property
    def bytes(self) -> int:
        """Bytes moved: every element read once and written once."""
        return 2 * math.prod(self.shape) * self.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes by which two problems of one class are near or far."""
        return (self.batch, self.m, self.n)

    @property
    def kind(self) -> tuple[Any, ...]:
        """All but the sizes: neighbours have the same."""
        runs = (len(self.plane.m), len(self.plane.n))
        spread = 0 in self.x_strides
        layouts = (self.x_layout, self.out_layout, self.x_align, self.out_align)
        return (self.op, self.itemsize, *layouts, runs, spread)

    @property
    def spans(self) -> tuple[int, int]:
        """How many elements of memory x and out span."""
        sizes = self.shape
        return (
            1 + sum((size - 1) * step for size, step in zip(sizes, self.x_strides, strict=True)),
            1 + sum((size - 1) * step for size, step in zip(sizes, self.out_strides, strict=True)),
        )

    @property
    def label(self) -> str:
        """A short name for a table of results: out's dimensions, and where each stood in x."""
        order = sorted(range(len(self.shape)), key=lambda i: (-self.x_strides[i], i))
        places = ",".join(str(order.index(i)) for i in range(len(self.shape)))
        return f"{'x'.join(map(str, self.shape)) or '1'} from ({places or '0'}) {self.itemsize}-byte"


def _alignment(itemsize: int, address: int, strides: Sequence[int]) -> int:
    """The largest power of two, up to 16, that divides the address and all strides but 1, in bytes."""
    align = 16
    for place in (address, *(step * itemsize for step in strides if step != 1)):
        while place % align:
            align //= 2
    return align


def _widened(
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    itemsize: int,
    addresses: tuple[int, int],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """The same with pairs of elements as one, again and again, where short runs stay side by side."""
    while itemsize < 8:
        inner = [i for i, steps in enumerate(zip(x_strides, out_strides, strict=True)) if steps == (1, 1)]
        others = [s for steps in (x_strides, out_strides) for i, s in enumerate(steps) if [i] != inner]
        if (
            not inner
            or shape[inner[0]] * itemsize > 64
            or any(value % 2 for value in (shape[inner[0]], *others))
            or any(address % (2 * itemsize) for address in addresses)
        ):
            break
        itemsize *= 2
        shape = tuple(size // 2 if i == inner[0] else size for i, size in enumerate(shape))
        x_strides, out_strides = (
            tuple(1 if i == inner[0] else step // 2 for i, step in enumerate(steps))
            for steps in (x_strides, out_strides)
        )
        shape, (x_strides, out_strides) = merged(shape, x_strides, out_strides)
    return shape, x_strides, out_strides, itemsize


def _pairs(value: Any) -> bool:
    """Whether it is a tuple of (name, value) pairs."""
    whole = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return whole and all(isinstance(name, str) for name, _ in value)


def _plain(value: Any) -> bool:
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, int | float | bool | str | None) and finite


@dataclass(frozen=True)
class KernelProblem:
    """One call of a kernel that `tritile.autotune` decorates: its name, key values and dtypes."""

    op: ClassVar[str] = "kernel"
    kernel: str
    key: tuple[tuple[str, int | float | bool | str | None], ...]
    dtypes: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        _check(isinstance(self.kernel, str), self, "the kernel's name")
        _check(_pairs(self.key) and all(_plain(v) for _, v in self.key), self, "plain, finite key values")
        _check(
            _pairs(self.dtypes) and all(isinstance(v, str) for _, v in self.dtypes), self, "dtypes by name"
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The whole numbers of the key: by them two problems of one kernel are near or far."""
        return tuple(v for _, v in self.key if isinstance(v, int) and not isinstance(v, bool) and v > 0)

    @property
    def label(self) -> str:
        """A short name for a table of results."""
        return f"{self.kernel} " + " ".join(f"{name}={value}" for name, value in self.key)


Problem = MatmulProblem | PermuteProblem | KernelProblem
_KINDS: Final[dict[str, type]] = {kind.op: kind for kind in (MatmulProblem, PermuteProblem, KernelProblem)}


def doublings(a: Problem, b: Problem) -> float:
    """How far apart the sizes of two problems are: 1 where one size is twice the other's."""
    return sum(abs(math.log2(x / y)) for x, y in zip(a.sizes, b.sizes, strict=True))


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """A dictionary that JSON holds and `problem_from_dict` reads back."""
    return {"op": problem.op} | asdict(problem)


def problem_key(problem: Problem) -> str:
    """The problem as one line of JSON, the same for equal problems."""
    return json.dumps(problem_to_dict(problem), sort_keys=True, separators=(",", ":"))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def problem_from_dict(data: Any) -> Problem:
    """The problem that `problem_to_dict` wrote. Raises InvalidValueError for anything else."""
    kind = _KINDS.get(str(data.get("op"))) if isinstance(data, Mapping) else None
    if kind is None or set(data) - {"op"} != {field.name for field in fields(kind)}:
        raise InvalidValueError(f"{str(data)[:200]!r} is no problem of {', '.join(_KINDS)}")
    try:
        problem: Problem = kind(**{name: _tuples(value) for name, value in data.items() if name != "op"})
        return problem
    except TypeError as error:
        raise InvalidValueError(f"{str(data)[:200]!r} is no problem: {error}") from error
