"""Problems of permutations: what is merged and widened, which dimensions make tiles, what is refused."""

import itertools
import math
import random

import pytest

from tritile.core.problem import PermuteProblem, problem_from_dict, problem_to_dict
from tritile.errors import InvalidValueError
from tritile.families.permute import family as permute
from tritile.families.permute.family import uneven


def strides_of(shape):
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def permuted(shape, dims, itemsize=4, **rest):
    moved = [shape[dim] for dim in dims]
    steps = strides_of(shape)
    return PermuteProblem.of(moved, [steps[dim] for dim in dims], strides_of(moved), itemsize, **rest)


@pytest.mark.parametrize(
    ("shape", "dims", "wanted"),
    [
        ((4, 6, 8), (0, 1, 2), ((192,), (1,), (1,))),
        ((4, 6, 8), (2, 0, 1), ((8, 24), (1, 8), (24, 1))),
        ((4, 1, 6, 1), (2, 1, 0, 3), ((6, 4), (1, 6), (4, 1))),
        ((1, 1), (1, 0), ((), (), ())),
    ],
)
def test_dimensions_that_stay_together_are_one(shape, dims, wanted):
    found = permuted(shape, dims, 8)
    assert (found.shape, found.x_strides, found.out_strides) == wanted


def test_short_rows_move_as_wider_words():
    assert permuted((5, 7, 4), (1, 0, 2), 2).itemsize == 8
    assert permuted((5, 7, 6), (1, 0, 2), 2).itemsize == 4
    assert permuted((5, 7, 3), (1, 0, 2), 2).itemsize == 2
    assert permuted((5, 7, 4), (1, 0, 2), 2, addresses=(4, 0)).itemsize == 4
    assert permuted((5, 7, 4), (1, 0, 2), 2, widen=False).itemsize == 2
    assert permuted((5, 7, 512), (1, 0, 2), 2).itemsize == 2  # loads of them are wide as they are


@pytest.mark.parametrize("seed", range(60))
def test_tiles_and_what_lies_side_by_side_in_them(seed):
    draw = random.Random(seed)
    shape = [draw.choice((2, 3, 4, 6, 8, 40)) for _ in range(draw.randint(1, 5))]
    problem = permuted(shape, draw.sample(range(len(shape)), len(shape)), draw.choice((1, 4, 8)))
    m, n, batch = problem.plane
    assert sorted((*m, *n, *batch)) == list(range(len(problem.shape)))
    assert math.prod((problem.m, problem.n, problem.batch)) == math.prod(problem.shape)
    blocks = draw.choice((1, 4, 32, 128)), draw.choice((1, 4, 32, 128))
    sizes = []
    for group, side in zip((m, n), blocks, strict=True):
        for i in group:
            sizes.append((i, min(problem.shape[i], max(1, side))))
            side //= problem.shape[i]
    for steps, run in zip((problem.x_strides, problem.out_strides), problem.runs(*blocks), strict=True):
        places = {
            sum(at * steps[i] for at, (i, _) in zip(index, sizes, strict=True))
            for index in itertools.product(*(range(size) for _, size in sizes))
        }
        assert set(range(run)) <= places


def test_problems_survive_being_written():
    problem = permuted((5, 7, 3), (2, 0, 1), 2)
    assert problem_from_dict(problem_to_dict(problem)) == problem


@pytest.mark.parametrize(
    "values",
    [
        ((4, 4), (4, 1), (4,), 4),
        ((4, 0), (4, 1), (1, 4), 4),
        ((4, True), (4, 1), (1, 4), 4),
        ((4, 4), (4, -1), (1, 4), 4),
        ((4, 4), (4, 1.0), (1, 4), 4),
        (("4", 4), (4, 1), (1, 4), 4),
        ((4, 4), (4, 1), (1, 4), 3),
        ((4, 4), (4, 1), (1, 4), "4"),
        ((4, 4), (4, 1), (1, 4), 0),
    ],
    ids=str,
)
def test_what_is_no_problem_is_refused(values):
    for make in (PermuteProblem, PermuteProblem.of):
        with pytest.raises(InvalidValueError, match="wanted"):
            make(*values)


def test_an_output_without_strides_has_a_plane_all_the_same():
    problem = PermuteProblem((4, 4), (4, 1), (0, 0), 4)
    assert (problem.m * problem.n * problem.batch, problem.runs(16, 16)[1]) == (16, 1)


@pytest.mark.parametrize("sizes", [(0, 2, 2), (1, -2, 2), (1.0, 2, 2), (True, 2, 2)], ids=str)
def test_turned_matrices_have_sizes(sizes):
    with pytest.raises(InvalidValueError, match="sizes of 1"):
        PermuteProblem.turned(*sizes, 4)


@pytest.mark.parametrize("size", [2, 3, 5, 7, 23, 255, 256, 257, 2**20 - 1, 2**30, 2**30 + 1, 2**31 - 1])
def test_digits_divide_as_whole_numbers_do(size):
    ((given, magic, shift),) = permute.digits((size, 9))
    assert given == size
    assert -(2**31) <= magic < 0
    near = [
        index + by for index in range(0, 2**31, max(size, 2**31 // 997 // size * size)) for by in (-1, 0, 1)
    ]
    for index in [0, size - 1, size, 2**31 - 1, *near]:
        if 0 <= index < 2**31:
            assert (index * (magic + 2**32) >> 32) >> shift == index // size


def test_tiles_are_uneven_where_overlap_would_copy_much_twice():
    assert [uneven(extent, 64) for extent in (64, 128, 127, 4097, 63, 65, 143, 600)] == [
        False, False, False, False, True, True, True, False
    ]  # fmt: skip
