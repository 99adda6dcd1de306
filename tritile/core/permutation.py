"""Copies that reorder dimensions, as problems."""

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

from tritile.core.fields import ALIGNMENTS, Base, alignment, check, check_fields, check_sizes, is_extent
from tritile.errors import InvalidValueError

_TILE: Final = 4096  # elements that the dimensions of a tile should have
Strides = tuple[tuple[int, ...], ...]  # of each operand


def merged(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], Strides]:
    """Return the same index space with the fewest dimensions: ones dropped, neighbours merged.

    Two neighbours merge if, in every operand, stepping the outer once is stepping the inner
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
    """Hold the dimensions of a permutation that make its tiles; those of m and n innermost first.

    x is densest along `n`, out along `m`. Each is one dimension, or several that follow each other without a
    gap in x (n) or in out (m). If these have few elements, n takes the next densest dimensions of x as well.
    `batch` holds the rest, outermost first.
    """

    m: tuple[int, ...]
    n: tuple[int, ...]
    batch: tuple[int, ...]


def _run(
    first: int, shape: Sequence[int], strides: Sequence[int], free: Collection[int], enough: int
) -> tuple[int, ...]:
    """Return `first` and the dimensions that follow it without a gap, until together they have `enough`."""
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
class PermuteProblem(Base):
    """A copy of elements from x to out, with dimensions reordered, over one index space.

    Attributes:
        shape: dimensions of out, outermost first, without those of size 1, and with those merged that stay
            together.
        x_strides: strides of x in that order of dimensions, in elements.
        out_strides: strides of out, in elements.
        itemsize: bytes of an element.
        x_align: as in `MatmulProblem`.
        out_align: as in `MatmulProblem`.

    Raises:
        InvalidValueError: a field is out of its range.
    """

    op: ClassVar[str] = "permute"
    invariant: ClassVar[bool] = False  # it moves bits, and sums nothing
    shape: tuple[int, ...]
    x_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    itemsize: int
    x_align: int = 16
    out_align: int = 16

    def __post_init__(self) -> None:
        lists = (self.shape, self.x_strides, self.out_strides)
        check(all(isinstance(values, tuple) for values in lists), self, "shape and strides as tuples")
        check(len({len(values) for values in lists}) == 1, self, "a stride for every dimension")
        check_sizes(self, *self.shape)
        steps = (*self.x_strides, *self.out_strides)
        whole = all(type(step) is int and is_extent(step + 1) for step in steps)
        check(whole, self, "whole strides from 0")
        check_fields(self, itemsize=ALIGNMENTS, x_align=ALIGNMENTS, out_align=ALIGNMENTS)

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
        """Return the problem of moving x, whose dimensions are in out's order, to out.

        `widen`: elements that always stay side by side may be moved as one of up to 8 bytes.
        """
        cls(tuple(shape), tuple(x_strides), tuple(out_strides), itemsize)  # checks them
        sizes, strides = merged(shape, x_strides, out_strides)
        if widen:
            sizes, strides, itemsize = _widened(sizes, strides, itemsize, addresses)
        aligns = (
            alignment(at, *(step * itemsize for step in steps if step != 1))
            for at, steps in zip(addresses, strides, strict=True)
        )
        return cls(sizes, strides[0], strides[1], itemsize, *aligns)

    @classmethod
    def transposed(cls, batch: int, m: int, n: int, itemsize: int) -> "PermuteProblem":
        """Return a batch of contiguous m x n matrices, each transposed."""
        sizes = (batch, m, n)
        if not all(map(is_extent, sizes)):
            raise InvalidValueError(f"{sizes} matrices: expected sizes of 1 and more")
        return cls.of((batch, n, m), (m * n, 1, n), (m * n, m, 1), itemsize, widen=False)

    @functools.cached_property
    def plane(self) -> Plane:
        """Return the dimensions that make the tiles."""
        axes = [i for i, size in enumerate(self.shape) if size > 1]
        x, out = self.x_strides, self.out_strides
        dense_x = min(axes, key=lambda i: (x[i] == 0, x[i], -i), default=None)
        if dense_x is None:
            return Plane((), (), ())
        rest = sorted((i for i in axes if i != dense_x), key=lambda i: (out[i], x[i]))
        if not rest:
            return Plane((), (dense_x,), ())
        long = max(32, 256 // self.itemsize)
        both = out[dense_x] == min((step for step in out if step), default=0)  # out is densest there too
        # Long runs matter more to writes than to reads.
        m = _run(rest[0], self.shape, out, rest[1:], long // 2)
        free, rows = [i for i in rest if i not in m], math.prod(self.shape[i] for i in m)
        n = (dense_x,) if both else _run(dense_x, self.shape, x, free, max(long, _TILE // rows))
        columns = math.prod(self.shape[i] for i in n)
        free = [i for i in free if i not in n]
        m = _run(rest[0], self.shape, out, [*m[1:], *free], max(long, _TILE // columns))
        size = columns * math.prod(self.shape[i] for i in m)
        for i in sorted(free, key=lambda i: x[i]):
            if size >= _TILE:
                break
            if i not in m:
                n, size = (*n, i), size * self.shape[i]
        return Plane(m, n, tuple(i for i in axes if i not in m and i not in n))

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int]:
        """The number of planes, and their sides: m, along which out is densest, and n, along which x is."""
        batch, m, n = (
            math.prod(self.shape[i] for i in dims) for dims in (self.plane.batch, self.plane.m, self.plane.n)
        )
        return batch, m, n

    @property
    def batch(self) -> int:
        return self.sizes[0]

    @property
    def m(self) -> int:
        return self.sizes[1]

    @property
    def n(self) -> int:
        return self.sizes[2]

    def _layout(self, strides: tuple[int, ...]) -> str:
        if self.plane.n and strides[self.plane.n[0]] == 1:
            return "row"
        return "column" if self.plane.m and strides[self.plane.m[0]] == 1 else "strided"

    @functools.cached_property
    def x_layout(self) -> str:
        """Say along which side of a tile x is contiguous: n ("row"), m ("column"), or neither ("strided")."""
        return self._layout(self.x_strides)

    @functools.cached_property
    def out_layout(self) -> str:
        return self._layout(self.out_strides)

    @functools.cached_property
    def is_transposing(self) -> bool:
        """True if out is denser along m than along n: x and out then differ in the order of a tile."""
        m, n, _ = self.plane
        return bool(m) and self.out_strides[m[0]] < self.out_strides[n[0]]

    @functools.cached_property
    def n_digits(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return sizes and strides of x along n, innermost first: one of each if n has no gap in x."""
        dims = self.plane.n[::-1]
        sizes, (strides,) = merged([self.shape[i] for i in dims], [self.x_strides[i] for i in dims])
        return (sizes[::-1] or (1,), strides[::-1] or (0,))

    def runs(self, block_m: int, block_n: int) -> tuple[int, int]:
        """Return how many elements of a tile lie side by side in x, and in out."""
        return _runs(self, min(block_m, self.m), min(block_n, self.n))

    @functools.cached_property
    def bytes(self) -> int:
        return 2 * math.prod(self.shape) * self.itemsize

    @property
    def kind(self) -> tuple[Any, ...]:
        dims = (len(self.plane.m), len(self.plane.n))
        layouts = (self.x_layout, self.out_layout, self.x_align, self.out_align)
        return (self.op, self.itemsize, *layouts, dims, 0 in self.x_strides)

    @property
    def spans(self) -> tuple[int, int]:
        def span(strides: tuple[int, ...]) -> int:
            return 1 + sum((size - 1) * step for size, step in zip(self.shape, strides, strict=True))

        return span(self.x_strides), span(self.out_strides)

    @property
    def label(self) -> str:
        """Return a short name for a table of results: out's dimensions, and where each stood in x."""
        order = sorted(range(len(self.shape)), key=lambda i: (-self.x_strides[i], i))
        places = ",".join(str(order.index(i)) for i in range(len(self.shape)))
        return f"{'x'.join(map(str, self.shape)) or '1'} from ({places or '0'}) {self.itemsize}-byte"


def _widened(
    shape: tuple[int, ...], strides: Strides, itemsize: int, addresses: tuple[int, int]
) -> tuple[tuple[int, ...], Strides, int]:
    """Take pairs of elements as one, again and again, as long as short runs stay side by side."""
    while itemsize < 8:
        inner = next((i for i, steps in enumerate(zip(*strides, strict=True)) if steps == (1, 1)), None)
        if inner is None or shape[inner] * itemsize > 64:
            break
        others = [step for steps in strides for i, step in enumerate(steps) if i != inner]
        if any(value % 2 for value in (shape[inner], *others)):
            break
        if any(address % (2 * itemsize) for address in addresses):
            break
        halved = [size // 2 if i == inner else size for i, size in enumerate(shape)]
        itemsize *= 2
        shape, strides = merged(
            halved, *([1 if i == inner else step // 2 for i, step in enumerate(steps)] for steps in strides)
        )
    return shape, strides, itemsize


@functools.lru_cache(4096)  # a space has many configs of one tile
def _runs(problem: PermuteProblem, block_m: int, block_n: int) -> tuple[int, int]:
    m, n, _ = problem.plane
    tile: dict[int, int] = {}  # elements of each dimension
    for dims, side in ((m, block_m), (n, block_n)):
        for i in dims:
            tile[i] = min(problem.shape[i], max(1, side))
            side //= problem.shape[i]

    def run(steps: tuple[int, ...], first: tuple[int, ...]) -> int:
        if not first or steps[first[0]] != 1:
            return 1
        reach = 1
        while following := [i for i in tile if steps[i] == reach]:
            reach *= tile[following[0]]
            if tile[following[0]] < problem.shape[following[0]]:
                break
        return reach

    out = m if problem.out_layout == "column" else n
    return run(problem.x_strides, n), run(problem.out_strides, out)
