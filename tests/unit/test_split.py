"""Products whose last tiles are split along K: how tiles are shared out, and what may be made so."""

import random
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from tests.interleaved import Turns
from tritile.core.config import Config
from tritile.core.device import TARGETS, target_device
from tritile.core.posed import posed
from tritile.core.problem import MatmulProblem
from tritile.families import numerics
from tritile.families.matmul_split import kernel
from tritile.families.matmul_split.family import FAMILY, TURNS, tail_of
from tritile.families.space import illegal
from tritile.families.work import work_of

H200 = target_device("nvidia-h200")
DEEP = MatmulProblem(1, 1011, 576, 22528, "bfloat16", "bfloat16")


def config(m=128, n=128, k=64, consumers=2, stages=6, subtiles=1):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "CONSUMERS": consumers}
    return Config.of(4, stages, "split", **blocks, SUBTILES=subtiles)


def test_tiles_that_fill_all_processors_are_whole_and_the_rest_is_split():
    assert tail_of(264, 100, 132) == (132, 264, 0, 1)
    assert tail_of(800, 80, 132) == (132, 792, 8, 16)
    assert tail_of(40, 352, 132) == (120, 0, 40, 3)
    assert tail_of(100, 352, 132) == (100, 100, 0, 1)  # no processors are left for another part
    assert tail_of(1, 4000, 132) == (132, 0, 1, 132)
    assert tail_of(1, 9, 132) == (2, 0, 1, 2)  # of four turns at the least


def test_every_turn_of_every_tile_is_made_once_whatever_the_sizes():
    """As the kernel shares them out: whole tiles in waves, then part `me // rest` of tile `me % rest`."""
    dice = random.Random(0)
    for _ in range(300):
        made, turns, processors = dice.randint(1, 2000), dice.randint(1, 600), dice.choice((1, 8, 114, 132))
        programs, whole, rest, split = tail_of(made, turns, processors)
        assert (whole + rest, 1 <= programs <= processors) == (made, True)
        assert split == 1 or (rest * split <= programs and turns // split >= TURNS)
        done = {tile: turns for me in range(programs) for tile in range(me, whole, programs)}
        for me in range(rest * split):
            part, tile = me // rest, whole + me % rest
            done[tile] = done.get(tile, 0) + (part + 1) * turns // split - part * turns // split
        assert done == dict.fromkeys(range(made), turns)


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (replace(DEEP, dtype="float8_e4m3fn", b_layout="column"), "no tile"),
        (replace(DEEP, dtype="float32", out_dtype="float32"), "no tile"),
        (replace(DEEP, out_layout="column"), "not row by row"),
        (replace(DEEP, k=2**30), "more than is counted"),
    ],
    ids=str,
)
def test_what_may_not_be_split_is_said(problem, why):
    assert illegal(config(), DEEP, H200) is None
    assert why in illegal(config(), problem, H200)
    assert illegal(config(), DEEP, TARGETS["sm_80"])
    assert "BLOCK_N" in illegal(config(n=112), DEEP, H200)
    assert "num_ctas" in illegal(replace(config(), num_ctas=2), DEEP, H200)
    assert "parameters" in illegal(replace(config(), kwargs=config().kwargs[:-1]), DEEP, H200)


def test_it_makes_nothing_where_no_tile_is_split():
    assert not FAMILY.pointless(config(), DEEP, H200)
    for whole in (replace(DEEP, m=16896, n=8192), replace(DEEP, k=256)):  # 132 by 64 tiles
        assert "no tile is split" in illegal(config(), whole, H200)


def test_batch_invariant_products_are_never_split():
    """Sizes decide how many parts there are."""
    assert numerics.numerics(config(), DEEP, H200) != numerics.canonical(DEEP, H200)


def test_a_call_has_room_for_all_parts_and_a_counter_for_each_tile_and_consumer():
    work = work_of(posed(DEEP), config(), 132, True)
    assert work.steps[-1].grid == (120, 1, 1)
    assert work.scratch["parts"].elements == 120 * 128 * 128
    assert work.counters == 40 * 2


class Meeting:
    """Programs that made the parts of one tile, in threads that take turns before each atomic operation.

    `polls` by program: how often each looks whether all parts are there.
    """

    def __init__(self, dice, split, groups, polls):
        self.groups, self.polls = groups, polls
        self.turns, self.local = Turns(dice.choice), threading.local()
        self.tail = SimpleNamespace(counters=0, whole=0, rest=1, split=split)

    def __gt__(self, looked):
        return looked < self.polls[self.local.me]

    def atomic_add(self, _, value, sem):
        self.turns.switch()
        before, self.counter = self.counter, self.counter + value
        self.there.add(self.local.me)
        return before

    def atomic_cas(self, _, wanted, value, sem):
        self.turns.switch()
        before = self.counter
        self.counter = value if before == wanted else before
        return before

    def program(self, share_of, me):
        self.local.me = me
        first, step = share_of(0, 0, self.tail, SimpleNamespace(CONSUMERS=1, BLOCK_M=8 * self.groups))
        own = range(first, self.groups, step)
        assert not own or len(self.there) == self.tail.split
        self.summed += own

    def launch(self, share_of, counter):
        """Return what the counter holds in the end, and each group as often as it was summed."""
        self.counter, self.there, self.summed = counter, set(), []
        self.turns.run([partial(self.program, share_of, me) for me in range(self.tail.split)])
        return self.counter, self.summed


@pytest.fixture
def share_of(monkeypatch):
    """The kernel's own function, in Python, for the programs of a meeting."""

    def of(meeting):
        language = SimpleNamespace(
            program_id=lambda _: meeting.local.me,
            maximum=max,
            where=lambda condition, yes, no: yes if condition else no,
            atomic_add=meeting.atomic_add,
            atomic_cas=meeting.atomic_cas,
        )
        monkeypatch.setattr(kernel, "gl", language)
        monkeypatch.setattr(kernel, "POLLS", meeting)
        return function

    function = kernel.share_of.fn
    monkeypatch.setattr(kernel, "tma", SimpleNamespace(barrier=lambda: None))
    for name in ("ALL", "ARRIVAL", "PLACES"):
        monkeypatch.setattr(kernel, name, getattr(kernel, name).value)
    return of


@pytest.mark.parametrize("polls", [(1,), (1, 2, 10**9), (10**9,)], ids=["few", "some", "many"])
def test_every_group_of_rows_is_summed_once_all_parts_are_there(share_of, polls):
    """Whoever comes last, waits or gives up; and the counter is as the next launch wants it."""
    dice = random.Random(0)
    for _ in range(60):
        split, groups = dice.choice((2, 3, 5, 16, 40)), dice.choice((8, 16))
        meeting, counter = Meeting(dice, split, groups, [dice.choice(polls) for _ in range(split)]), 0
        for turn in range(3):
            counter, summed = meeting.launch(share_of(meeting), counter)
            assert counter % (256 * 65536) == 0
            assert turn < counter // (256 * 65536) <= 2 * (turn + 1)
            assert sorted(summed) == [*range(groups)]  # each by one program, whoever gives up
