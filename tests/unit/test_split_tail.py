"""Tiles of the last wave that are made in parts of K: how they are shared out, and how parts meet."""

import random
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from tests.configs import split
from tests.interleaved import Turns
from tritile.choose import waves
from tritile.core.call import call_for
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.families.common.cost import TURNS
from tritile.families.matmul_wgmma import kernel
from tritile.families.matmul_wgmma.family import tail_of
from tritile.families.work import work_of

H200 = target_device("nvidia-h200")
DEEP = MatmulProblem(1, 1011, 576, 22528, "bfloat16", "bfloat16")
OWN = split(128, 128, 2, 6)


def test_full_waves_whole_rest_split():
    assert tail_of(264, 100, 132) == (132, 264, 0, 1)
    assert tail_of(800, 80, 132) == (132, 792, 8, 16)
    assert tail_of(40, 352, 132) == (120, 0, 40, 3)
    assert tail_of(100, 352, 132) == (100, 100, 0, 1)  # no processors are left for another part
    assert tail_of(1, 4000, 132) == (132, 0, 1, 132)
    assert tail_of(1, 9, 132) == (2, 0, 1, 2)  # of four turns at the least


def test_turns_of_tiles_made_once():
    """As the kernel shares them out: whole tiles in waves, then part `me // rest` of tile `me % rest`."""
    dice = random.Random(0)
    for _ in range(300):
        made, turns, processors = dice.randint(1, 2000), dice.randint(1, 600), dice.choice((1, 8, 114, 132))
        programs, whole, rest, parts = tail_of(made, turns, processors)
        assert (whole + rest, 1 <= programs <= processors) == (made, True)
        assert parts == 1 or (rest * parts <= programs and turns // parts >= TURNS)
        done = {tile: turns for me in range(programs) for tile in range(me, whole, programs)}
        for me in range(rest * parts):
            part, tile = me // rest, whole + me % rest
            done[tile] = done.get(tile, 0) + (part + 1) * turns // parts - part * turns // parts
        assert done == dict.fromkeys(range(made), turns)


def test_room_and_counters_of_parts():
    work = work_of(call_for(DEEP), OWN, 132, True)
    assert work.steps[-1].grid == (120, 1, 1)
    assert work.scratch["parts"].elements == 120 * 128 * 128
    assert work.counters == 40 * 2


def test_parts_save_part_waves():
    whole = split(128, 128, 2, 6).derived(pair for pair in OWN.kwargs if pair[0] != "SPLIT_TAIL")
    assert waves.predict_us(OWN, DEEP, H200) < 0.6 * waves.predict_us(whole, DEEP, H200)


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
def test_groups_of_rows_summed_once(share_of, polls):
    """Whoever comes last, waits or gives up; and the counter is as the next launch wants it."""
    dice = random.Random(0)
    for _ in range(20):
        split, groups = dice.choice((2, 3, 5, 16, 40)), dice.choice((8, 16))
        meeting, counter = Meeting(dice, split, groups, [dice.choice(polls) for _ in range(split)]), 0
        for turn in range(3):
            counter, summed = meeting.launch(share_of(meeting), counter)
            assert counter % (256 * 65536) == 0
            assert turn < counter // (256 * 65536) <= 2 * (turn + 1)
            assert sorted(summed) == [*range(groups)]  # each by one program, whoever gives up
