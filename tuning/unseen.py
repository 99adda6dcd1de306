"""The suite "unseen": products and permutations of sizes that nobody chose, drawn anew for each version.

The seed is the hash of the files of `tritile/`: whoever changes the code changes the sizes, so nothing can be
tuned to them.

Products: bf16, NN and NT in turn, M log-uniform from 1 to 16384, N and K from 32 to 32768, 2e7 to 2e12
operations. Half of them are drawn *by size*, as they come; most of these take a few microseconds. The other
half is drawn *by time*, of those that need 20 us and more: nearly all of a user's time goes there.
Permutations: rank 2 to 5, 1 to 16 bytes an element, 1 MB to 1 GB. Of each *shape* it is drawn whether its
sizes (M left out) are multiples of 64 (60%), of 8 (20%) or any (20%).
"""

import contextlib
import hashlib
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import tritile
from benchmark_results import BY_SIZE, BY_TIME
from tritile.choose import pick
from tritile.choose.classes import OPERATIONS, ROWS, SIDES
from tritile.core.device import Device
from tritile.core.forgetting import forget
from tritile.core.problem import MatmulProblem
from tritile.errors import InvalidValueError
from tritile.lab.warm import Calls, compile_calls
from tritile.tune.calibrate.draw import LONG_US, limits_us, log_uniform, permutation, sized
from tritile.tune.suites import OF_ITEMSIZE, Case

SUITE: Final = "unseen"
PRODUCTS: Final = 100  # of each half
PERMUTATIONS: Final = 100
SEARCHED: Final = (
    6  # aligned and ragged products of each half, compared with torch.compile's max-autotune too
)
_PACKAGE: Final = Path(tritile.__file__).parent
_UNITS: Final = (64, 8, 1), (60, 20, 20)  # what sizes of a shape are multiples of, and how often


def seed_of(draw: int = 1) -> str:
    """Return the seed of a draw, counted from 1: of the first, `TRITILE_SEED`, else the code's.

    The code's is a hash of the package's files; each further seed is that of the first and its number.
    """
    first = os.environ.get("TRITILE_SEED", "")
    if not first:
        hashed = hashlib.sha1(usedforsecurity=False)
        for path in sorted(path for path in _PACKAGE.rglob("*") if path.is_file()):
            name = path.relative_to(_PACKAGE)
            if "__pycache__" not in name.parts:
                hashed.update(f"{name.as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
        first = hashed.hexdigest()
    return first if draw == 1 else hashlib.sha1(f"{first} {draw}".encode(), usedforsecurity=False).hexdigest()


def _products(dice: random.Random, count: int, least_us: float) -> list[Case]:
    """Draw products that need so much time at least."""
    cases = list[Case]()
    while len(cases) < count:
        unit = dice.choices(*_UNITS)[0]
        m = log_uniform(dice, 1, ROWS)
        n, k = sized(dice, *SIDES, unit), sized(dice, *SIDES, unit)
        if OPERATIONS[0] <= 2 * m * n * k <= OPERATIONS[1]:
            case = Case(SUITE, "matmul", "bfloat16", ("NN", "NT")[len(cases) % 2], m=m, n=n, k=k)
            assert isinstance(case.problem, MatmulProblem)
            if max(limits_us(case.problem)) >= least_us:
                cases.append(case)
    return cases


def draw_by_time(seed: str, products: int = PRODUCTS) -> list[Case]:
    """Return the products of a seed that need `LONG_US` and more."""
    return list(dict.fromkeys(_products(random.Random(f"{seed} {BY_TIME}"), products, LONG_US)))


def draw(seed: str, products: int = PRODUCTS, permutations: int = PERMUTATIONS) -> list[Case]:
    """Return the products of a seed that are drawn by size, and its permutations."""
    dice = random.Random(seed)
    cases = _products(dice, products, 0.0)
    for _ in range(permutations):
        size = dice.choice(tuple(OF_ITEMSIZE))
        shape, dims = permutation(dice, size, dice.choices(*_UNITS)[0])
        cases.append(Case(SUITE, "permute", OF_ITEMSIZE[size], shape=shape, dims=dims))
    return list(dict.fromkeys(cases))


def draws(numbers: Iterable[int], only: str = "") -> list[tuple[dict[str, str], list[Case]]]:
    """Return both halves of draws, counted from 1: what their lines say of them, and their cases.

    A line says its `seed`, that of `seed_of`, and how its half is `drawn`. Cases are those whose names hold
    `only`. Raises InvalidValueError where there is no such case.
    """
    found = []
    for seed in map(seed_of, numbers):
        for how, cases in ((BY_SIZE, draw(seed)), (BY_TIME, draw_by_time(seed))):
            named = [case for case in cases if only in case.problem.label]
            found.append(({"seed": seed, "drawn": how}, named))
    if not any(cases for _, cases in found):
        raise InvalidValueError(f"--only {only!r}: no drawn case has that in its name")
    return found


def searched(cases: Iterable[Case]) -> list[Case]:
    """Return the first `SEARCHED` products whose N and K are multiples of 8, and of the others."""
    products = [case for case in cases if case.op == "matmul"]
    aligned = [case for case in products if case.n % 8 == case.k % 8 == 0]
    ragged = [case for case in products if case not in aligned]
    return aligned[:SEARCHED] + ragged[:SEARCHED]


@contextlib.contextmanager
def environ(**values: str | None) -> Iterator[None]:
    """Set variables of the environment, or unset those of None, in a `with`; forget plans at both ends."""
    before = dict(os.environ)
    try:
        for name, value in values.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        forget()
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
        forget()


@contextlib.contextmanager
def nothing_remembered() -> Iterator[None]:
    """Choose configs as on a machine where nothing was measured and no table is pinned, within a `with`."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        environ(TRITILE_CACHE_DIR=folder, TRITILE_TABLE=None),
    ):
        yield


def compile_all(cases: Iterable[Case], device: Device) -> None:
    """Compile what calls of the cases would launch, in parallel, into Triton's cache.

    A kernel that does not compile fails where it is measured; those of AMD GPUs are compiled there.
    """
    if device.backend != "cuda":
        return
    calls: Calls = {}
    for case in cases:
        plan = pick.plan_for(case.problem, device, "cached")
        assert plan is not None
        calls.setdefault(plan.config, []).append(case.problem)
    compile_calls(calls, device)
