"""The handshakes of specialised warps, by the kernel's own functions in Python, in drawn orders.

Each warp, and each copy by TMA, is a thread of `Turns`: before every step at a barrier another may go on. A
stage that is filled while tensor cores read it, a read of what was not copied yet, a tile of which products
are missing or made twice, and a wait that nobody ends are failures.
"""

import itertools
import random
import threading
from types import SimpleNamespace

import pytest

from tests.interleaved import Turns
from tritile.families.matmul_wgmma import kernel
from tritile.families.matmul_wgmma.family import tail_of

LONG = 20_000  # looks at a barrier, after which nobody will ever complete it


class Barrier:
    """An mbarrier: `count` arrivals, and as many bytes as are expected, complete a phase."""

    def __init__(self, machine, count=0):
        self.machine, self.count, self.pending, self.bytes, self.phases = machine, count, count, 0, 0

    def _settle(self):
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phases = self.count, self.phases + 1

    def arrive(self, count=1):
        self.machine.turns.switch()
        self.pending -= count
        assert self.pending >= 0
        self._settle()

    def expect(self, size):
        self.machine.turns.switch()
        self.pending, self.bytes = self.pending - 1, self.bytes + size
        assert self.pending >= 0
        self._settle()

    def arrived(self, size):
        self.bytes -= size
        self._settle()

    def wait(self, parity):
        for _ in range(LONG):
            self.machine.turns.switch()
            if (self.phases - 1) % 2 == parity:
                return
        pytest.fail("nobody completes this phase")


class Slots(list):
    """Tiles in shared memory, or barriers, by number. What a slot holds is its tile's place."""

    dtype = SimpleNamespace(primitive_bitwidth=16)

    def index(self, i):
        return self[i]

    def index_of(self, slot):
        return next(i for i, each in enumerate(self) if each is slot)


class Machine:
    """CTAs of `meta`, whose programs make `tiles` of `iterations` blocks of K."""

    def __init__(self, dice, meta, tiles_m, tiles_n, iterations, tail=None):
        self.dice, self.meta, self.turns, self.copies = dice, meta, Turns(dice.choice), []
        self.grid = kernel.Grid(tiles_m, tiles_n, 1, tiles_m * tiles_n, iterations, None, tail)

    def cta(self, rank):
        meta = self.meta
        counts = {"a": meta.STAGES * meta.CONSUMERS, "b": meta.STAGES}
        slots = {
            name: Slots(SimpleNamespace(holds=None, readers=0) for _ in range(count))
            for name, count in counts.items()
        }
        full = Slots(Barrier(self, 1) for _ in range(meta.STAGES))
        arrivals = 4 * meta.CONSUMERS * (2 - rank) if meta.CTAS == 2 else meta.CONSUMERS
        empty = Slots(Barrier(self, arrivals) for _ in range(meta.STAGES))
        return kernel.Stages(slots["a"], slots["b"], None, full, empty)


class Threads:
    """What is a thread's own: its CTA's rank and program, and its products under way."""

    def __init__(self):
        self.local = threading.local()

    def __getattr__(self, name):
        return getattr(self.local, name)


def play(monkeypatch, dice, meta, tiles_m, tiles_n, iterations, programs, tail=None):
    """Run all warps of all programs to their ends; return the products of each tile, by its corner."""
    here, done, both = Threads(), {}, meta.CTAS
    machine = Machine(dice, meta, tiles_m, tiles_n, iterations, tail)
    machine.here = here
    in_flight, left = [], [0]
    for name in ("tiles_of", "piece_at", "tile_at", "next_stage", "multiply", "produce", "consume"):
        function = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, getattr(function, "fn", function))
    language = SimpleNamespace(
        program_id=lambda axis: here.program if axis == 0 else 0,
        num_programs=lambda axis: programs,
        static_range=range, constexpr=int,
        minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b),
        where=lambda condition, yes, no: yes if condition else no,
    )  # fmt: skip
    monkeypatch.setattr(kernel, "gl", language)

    def fetch(which, outer, inner, row, column, order, to_both, barrier, tile):
        if not to_both:
            in_flight.append((which, row, column, here.rank, here.cta, barrier, tile))
        elif here.rank == 0:
            for rank, cta in enumerate(here.pair):
                own = here.cta.a if which == "a" else here.cta.b
                twin = (cta.a if which == "a" else cta.b)[own.index_of(tile)]
                in_flight.append(
                    (which, row, column, rank, cta, cta.full[here.cta.full.index_of(barrier)], twin)
                )

    sizes = {"a": meta.BLOCK_M // meta.CONSUMERS * meta.BLOCK_K * 2, "b": meta.BLOCK_N * meta.BLOCK_K * 2}

    def copies():
        idle = 0
        while left[0]:
            machine.turns.switch()
            if not in_flight:
                idle += 1
                assert idle < 50 * LONG, "copies wait for ever"
                continue
            idle = 0
            which, row, column, rank, _, barrier, tile = in_flight.pop(dice.randrange(len(in_flight)))
            assert not tile.readers, "filled while it is read"
            if which == "a":
                row += rank * (meta.BLOCK_M // meta.CONSUMERS)
            tile.holds = row, column
            barrier.arrived(sizes[which])

    monkeypatch.setattr(kernel, "fetch", fetch)
    monkeypatch.setattr(kernel, "operand", lambda tile, row: tile)
    monkeypatch.setattr(kernel, "zeros", lambda stages, meta: ([], []))

    def mma(a, b, acc, is_async):
        assert a.holds is not None
        assert b.holds is not None
        a.readers, b.readers = a.readers + 1, b.readers + 1
        here.issued.append((a, b, a.holds, b.holds))
        return acc

    def mma_wait(num_outstanding, deps):
        (acc,) = deps
        while len(here.issued) > num_outstanding:
            machine.turns.switch()
            a, b, of_a, of_b = here.issued.pop(0)
            assert (a.holds, b.holds) == (of_a, of_b)
            a.readers, b.readers = a.readers - 1, b.readers - 1
            assert of_a[1] == of_b[0]
            acc = [*acc, (of_a[0], of_b[1], of_a[1])]
        return acc

    monkeypatch.setattr(kernel, "warpgroup_mma", mma)
    monkeypatch.setattr(kernel, "warpgroup_mma_wait", mma_wait)
    barrier = SimpleNamespace(
        wait=lambda barrier, parity: barrier.wait(parity),
        expect=lambda barrier, size: barrier.expect(size),
        arrive=lambda barrier, count: barrier.arrive(count),
    )
    monkeypatch.setattr(kernel, "mbarrier", barrier)
    monkeypatch.setattr(kernel, "tma", SimpleNamespace(store_wait=lambda count: None))
    monkeypatch.setattr(
        kernel, "wait_empty", lambda stages, stage, phase, meta: stages.empty[stage].wait(phase)
    )

    def release(stages, stage, meta):
        if both == 1:
            return stages.empty[stage].arrive()
        for _ in range(4):  # a warp each
            here.pair[here.rank].empty[stage].arrive()
            if here.rank:
                here.pair[0].empty[stage].arrive()

    monkeypatch.setattr(kernel, "release", release)
    monkeypatch.setattr(kernel, "met", lambda stages, meta: stages)
    monkeypatch.setattr(kernel, "sync_pair", lambda: None)

    def store(which, acc, rest, outer, inner, m, n, *more):
        rows = meta.BLOCK_M // meta.CONSUMERS
        m += here.rank * rows
        assert {product[:2] for product in acc} == {(m, n)}
        done.setdefault((m, n), []).extend(product[2] for product in acc)

    monkeypatch.setattr(kernel, "store_tile", store)
    monkeypatch.setattr(
        kernel,
        "meet",
        lambda which, acc, rest, index, outer, inner, m, n, *more: store(
            which, acc, rest, outer, inner, m, n
        ),
    )
    threads = []
    for program in range(programs):
        pair = [machine.cta(rank) for rank in range(both)]
        for (rank, cta), which in itertools.product(enumerate(pair), range(meta.CONSUMERS + 1)):

            def warp(program=program, pair=pair, rank=rank, cta=cta, which=which):
                local = here.local
                local.program, local.pair, local.rank, local.cta, local.issued = program, pair, rank, cta, []
                if which < meta.CONSUMERS:
                    kernel.consume(which, cta, machine.grid, None, meta)
                else:
                    kernel.produce(SimpleNamespace(a="a", b="b"), cta, machine.grid, meta)
                assert not local.issued
                left[0] -= 1

            threads.append(warp)
    left[0] = len(threads)
    machine.turns.run([*threads, copies])
    assert not in_flight
    return done


def meta(consumers=2, stages=3, ctas=1, m=128, n=64, k=64):
    return kernel.Meta(
        True, True, True, False, m, n, k, n, 2, stages, consumers, 1, False, False, None, 0, 0, False, ctas,
    )  # fmt: skip


KINDS = {
    "one consumer": meta(1),
    "two consumers": meta(2),
    "three, few stages": meta(3, 2, m=192),
    "a pair": meta(2, 3, 2),
    "a pair of one consumer": meta(1, 2, 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_product_once_in_order(monkeypatch, kind):
    how, dice = KINDS[kind], random.Random(kind)
    for _ in range(12):
        tiles_m, tiles_n, iterations = dice.randint(1, 4), dice.randint(1, 3), dice.randint(1, 7)
        with monkeypatch.context() as patch:
            done = play(patch, dice, how, tiles_m, tiles_n, iterations, dice.randint(1, 3))
        rows, columns = how.BLOCK_M // how.CONSUMERS, how.BLOCK_N
        places = itertools.product(
            range(0, tiles_m * how.BLOCK_M * how.CTAS, rows), range(0, tiles_n * columns, columns)
        )
        assert done == {at: [i * how.BLOCK_K for i in range(iterations)] for at in places}


def test_split_tiles_get_each_product_once(monkeypatch):
    """In parts, each in the order of K: who sums them is `share_of`'s to tell."""
    how, dice = KINDS["two consumers"], random.Random(0)
    split = 0
    for _ in range(20):
        tiles_m, tiles_n, iterations, processors = (dice.randint(1, most) for most in (4, 3, 17, 7))
        programs, *tail = tail_of(tiles_m * tiles_n, iterations, processors)
        split += tail[1] > 0
        with monkeypatch.context() as patch:
            done = play(patch, dice, how, tiles_m, tiles_n, iterations, programs, kernel.Tail(0, 0, *tail))
        places = itertools.product(range(0, tiles_m * 128, 64), range(0, tiles_n * 64, 64))
        in_order = [i * 64 for i in range(iterations)]
        assert {at: sorted(found) for at, found in done.items()} == dict.fromkeys(places, in_order)
    assert split > 3
