"""Calls that were decided once: what is known of them in C++, what is asked anew, how they are launched."""

import contextlib
import contextvars
import ctypes
import threading

import pytest
import torch
import triton

import tritile
from tests.overriding import in_threads, switch
from tritile.in_torch import overrides, routes, tally
from tritile.ops.memo import Ready
from tritile.runtime.launch import Launch
from tritile.runtime.native import NativeLaunch

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.InterpreterWarning")
A, B, C = torch.randn(20, 8), torch.randn(8, 4), torch.randn(20, 4)
C_WANTED = A @ B
X, TURNED = torch.randn(512, 300), A.mT.contiguous().mT


@pytest.fixture
def decided(crossing, monkeypatch):
    """The calls that Python decided; `decided.ready` is how it has them launched, by default not at all."""

    class Decided(list):
        ready = None

    calls = Decided()

    def decide(call, learn):
        calls.append(call)
        if learn:
            learn(tally.Verdict(call, "a problem", calls.ready is not None, "by the test"), calls.ready)

    monkeypatch.setattr(overrides.building, "library", lambda: crossing)
    monkeypatch.setattr(routes, "product", lambda call, entry, tensors, words, learn: decide(call, learn))
    monkeypatch.setattr(routes, "copy", lambda entry, x, form, learn: decide("clone", learn))
    crossing.forget()
    yield calls
    overrides.remove_unwanted()
    assert not overrides._libraries


CALLS = [
    ("mm", lambda: A @ B),
    ("mm", lambda: torch.mm(A, B, out=torch.empty(20, 4))),
    ("bmm", lambda: torch.bmm(A[None], B[None])),
    ("bmm", lambda: torch.bmm(A[None], B[None], out=torch.empty(1, 20, 4))),
    ("addmm", lambda: torch.addmm(C, A, B, beta=0.5)),
    ("addmm", lambda: torch.addmm(C, A, B, alpha=2, out=torch.empty(20, 4))),
    ("baddbmm", lambda: torch.baddbmm(C[None], A[None], B[None])),
    ("clone", lambda: X.mT.contiguous()),
    ("clone", lambda: X[None, None].clone(memory_format=torch.channels_last)),
]


@pytest.mark.parametrize("policy", ["always", "expected"])
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_what_was_left_is_left_and_counted_without_python(decided, name, call, policy):
    wanted = call()
    with switch(policy) as report:
        for _ in range(3):
            assert torch.equal(call(), wanted)
        rows = report.rows
    assert decided == [name]
    assert rows == report.rows == [(name, False, "by the test", 2)]
    assert not report._tallies  # each would stay in memory as long as the report


OTHERS = {
    "rows": lambda: A[1:] @ B,
    "columns": lambda: A @ B[:, 1:],
    "strides": lambda: TURNED @ B,
    "dtype": lambda: A.double() @ B.double(),
    "address": lambda: torch.as_strided(A.view(-1), (19, 8), (8, 1), 1) @ B,
    "complex": lambda: torch.complex(A, A) @ torch.complex(B, B),
    "conjugated": lambda: torch.complex(A, A).conj() @ torch.complex(B, B),
    "the other conjugated": lambda: torch.complex(A, A) @ torch.complex(B, B).conj(),
    "out": lambda: torch.mm(A, B, out=torch.empty(20, 4)),
    "out, turned": lambda: torch.mm(A, B, out=torch.empty(4, 20).mT),
    "added": lambda: torch.addmm(C, A, B),
    "one row added": lambda: torch.addmm(C[0], A, B),
    "weighted": lambda: torch.addmm(C, A, B, beta=2),
    "weighted by a float": lambda: torch.addmm(C, A, B, beta=2.0),
    "otherwise weighted": lambda: torch.addmm(C, A, B, alpha=2),
}


def test_calls_that_differ_are_decided_apart(decided):
    calls = [lambda: A @ B, *OTHERS.values()]
    with switch():
        for _ in range(2):
            for call in calls:
                call()
    assert len(decided) == len(calls)


def test_decisions_are_of_a_policy_and_a_precision(decided):
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    with switch("always"):
        A @ B
        with switch("expected"):
            A @ B
            assert len(decided) == 2
            try:
                settings.fp32_precision = "tf32"
                A @ B
                assert len(decided) == 3
                A.double() @ B.double()
            finally:
                settings.fp32_precision = before
            A.double() @ B.double()
            A @ B
    assert len(decided) == 4


CONTEXTS = {"mode": lambda: tritile.mode("cached"), "batch_invariant": tritile.batch_invariant}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_python_is_asked_where_rules_may_differ(decided, context):
    with switch():
        A @ B
        with context():
            A @ B
            A @ B
        assert len(decided) == 3
        A @ B
    assert len(decided) == 3


def test_python_is_asked_by_a_task_that_outlasts_its_rules(decided):
    with switch():
        A @ B
        with tritile.batch_invariant():
            task = contextvars.copy_context()
        task.run(lambda: A @ B)
        task.run(lambda: A.double() @ B.double())
        assert len(decided) == 3
        del task
        A @ B
        A.double() @ B.double()
    assert len(decided) == 4


def test_decisions_by_rules_of_the_environment_are_not_kept(decided, monkeypatch):
    with switch():
        monkeypatch.setenv("TRITILE_BATCH_INVARIANT", "1")
        A @ B
        monkeypatch.delenv("TRITILE_BATCH_INVARIANT")
        A @ B
        A @ B
    assert len(decided) == 2


def test_python_is_asked_where_the_environment_has_rules(decided, monkeypatch):
    monkeypatch.setenv("TRITILE_MODE", "off")
    with switch():
        A @ B
        A @ B
        with switch("never"):
            A @ B
    assert len(decided) == 2


def test_what_is_forgotten_is_decided_anew(decided, crossing):
    with switch():
        A @ B
        assert crossing.known == 1
        tritile.forget()
        assert crossing.known == 0
        A @ B
        A @ B
    assert len(decided) == 2


def test_what_was_forgotten_as_it_was_decided_is_not_kept(decided, crossing, monkeypatch):
    def decide(call, entry, tensors, words, learn):
        decided.append(call)
        tritile.forget()
        learn(tally.Verdict(call, "", False, ""), None)

    monkeypatch.setattr(routes, "product", decide)
    with switch():
        A @ B
        A @ B
    assert len(decided) == 2
    assert crossing.known == 0


def test_nothing_waits_once_a_call_failed(decided, crossing, monkeypatch):
    def fail(*given):
        raise ZeroDivisionError

    monkeypatch.setattr(routes, "product", fail)
    with switch(), pytest.raises(ZeroDivisionError):
        A @ B
    crossing.learn(tally.Verdict("mm", "", False, ""), None)
    assert crossing.known == 0


def test_a_call_inside_another_is_not_taken_for_it(decided, crossing, monkeypatch):
    def decide(call, entry, tensors, words, learn):
        decided.append(call)
        if call == "mm":
            torch.addmm(C, A, B, beta=True)  # of which nothing can be known
        elif learn:
            learn(tally.Verdict(call, "", False, ""), None)

    monkeypatch.setattr(routes, "product", decide)
    with switch():
        A @ B
    assert decided == ["mm", "addmm"]
    assert crossing.known == 0


def test_a_slot_may_be_wanted_while_one_is_looked_for(monkeypatch):
    class Word(str):
        def __hash__(self):  # as a collected object that multiplies
            tally.slot_of(tally.Verdict("mm", "", False, "from within"))
            return 1

    monkeypatch.setattr(tally, "_verdicts", [])
    monkeypatch.setattr(tally, "_slots", {})
    monkeypatch.setattr(tally, "_SLOTS", 1)
    verdict = tally.Verdict(Word("mm"), "", False, "")
    thread = threading.Thread(target=tally.slot_of, args=(verdict,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_sizes_without_end_are_known_and_counted_together(decided, monkeypatch):
    monkeypatch.setattr(tally, "_SLOTS", len(tally._verdicts) + tally._UNNAMED)
    monkeypatch.setattr(tally, "_slots", {})
    with switch() as report:
        for rows in (18, 19):
            for _ in range(3):
                A[:rows] @ B
    assert len(decided) == 2
    assert {problem: len(rows) for problem, rows in report.problems.items()} == {"": 1}
    assert report.left == 4


def test_without_a_slot_python_decides(decided, monkeypatch):
    monkeypatch.setattr(tally, "_SLOTS", len(tally._verdicts))
    monkeypatch.setattr(tally, "_slots", {})
    with switch() as report:
        A @ B
        A @ B
    assert len(decided) == 2
    assert not report.rows


def test_threads_count_in_their_own_reports(decided):
    reports = [None, None]

    def work(turn):
        with switch() as reports[turn]:
            for _ in range(200):
                A @ B

    in_threads(lambda: work(0), lambda: work(1))
    assert sum(report.left for report in reports) + len(decided) == 400
    assert 1 <= len(decided) <= 2


class Gpu:
    """Stands for the driver: notes what kernels are launched with, and writes ones to the last buffer."""

    Launched = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
    )
    Replaced = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def __init__(self):
        self.launched, self.code = [], 0
        self.entries = self.Launched(self._launch), self.Replaced(self._replace)
        self.config, self.value = (ctypes.c_uint * 16)(*range(16)), ctypes.c_int32(7)
        self.map = (ctypes.c_uint64 * 16)(*range(100, 116))

    def _launch(self, config, function, given, extra):
        numbers = [
            ctypes.cast(given[i], ctypes.POINTER(ctypes.c_uint64)).contents.value for i in (0, 1, 3, 4)
        ]
        value = ctypes.cast(given[2], ctypes.POINTER(ctypes.c_int32)).contents.value
        table = (ctypes.c_uint64 * 16).from_address(given[5])
        assert not extra
        self.launched.append((function, numbers, value, list(table)))
        stream = ctypes.c_uint64.from_address(config + 32).value
        assert (list((ctypes.c_uint * 7).from_address(config)), stream) == ([*range(7)], 0)
        if not self.code:
            (ctypes.c_float * 80).from_address(numbers[1])[:] = [1.0] * 80
        return self.code

    def _replace(self, table, address):
        ctypes.c_uint64.from_address(table).value = address
        return 0

    def ready(self, shape=(20, 4)):
        """A call of two kernels: a, out, a value, a workspace, one that is always the same, and a's map."""
        step = object.__new__(NativeLaunch)
        step._function, step._config = 4711, self.config
        value, table = ctypes.addressof(self.value), ctypes.addressof(self.map)
        step._described = [(1, 0, 0), (1, 1, 0), (0, 0, value), (1, 3, 0), (1, 4, 0), (2, 0, table)]
        launch = object.__new__(Launch)
        launch._steps, launch._bytes, launch._offsets = [step, step], 768, [0, 512]
        launch._counted, launch.device = 3, 0
        return Ready.of(launch, (0, 2), (A, B), torch.empty(shape))


@pytest.fixture
def gpu(decided, crossing, monkeypatch):
    found = Gpu()
    zeros = torch.zeros(3, dtype=torch.int64)
    counters = type("Counters", (), {"take": lambda self, count, stream: zeros})()
    monkeypatch.setattr("tritile.runtime.launch.counters_of", lambda device: counters)
    crossing._library.tritile_driver(*found.entries)
    decided.ready, found.zeros = found.ready(), zeros
    yield found
    crossing._library.tritile_driver(None, None)
    crossing.forget()


def test_what_was_taken_is_launched(decided, gpu):
    a, ones = A.clone(), torch.ones(20, 4)
    with switch() as report:
        a @ B  # which the decision of this test leaves
        got = [a @ B for _ in range(2)]
    assert decided == ["mm"]
    assert all(torch.equal(one, ones) for one in got)
    assert report.rows == [("mm", True, "by the test", 2)]
    assert len(gpu.launched) == 4  # of two kernels each
    function, (first, out, workspace, fixed), value, table = gpu.launched[-1]
    assert (function, value) == (4711, 7)
    assert (first, out, fixed) == (a.data_ptr(), got[-1].data_ptr(), gpu.zeros.data_ptr())
    assert table == [a.data_ptr(), *range(101, 116)]
    assert (workspace % 64, list(gpu.map)) == (0, list(range(100, 116)))
    assert gpu.launched[-2] == gpu.launched[-1]


def test_an_output_of_the_callers_is_written_unless_it_is_read(decided, gpu):
    out = torch.zeros(20, 4)
    with switch():
        torch.mm(A, B, out=out)
        assert torch.mm(A, B, out=out) is out
        assert torch.equal(out, torch.ones(20, 4))
        both = torch.randn(400)
        a, over = both[:160].view(20, 8), both[80:160].view(20, 4)
        torch.mm(a, B, out=over)
    assert decided == ["mm", "mm"]
    assert len(gpu.launched) == 2


@pytest.mark.parametrize("start", [0, 8])
def test_a_storage_that_was_freed_is_not_launched(decided, gpu, start):
    a = torch.randn(21, 8).view(-1)[start : start + 160].view(20, 8)  # as a part of FSDP's
    with switch():
        a @ B
        a @ B
        a.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="data is not allocated"):
            a @ B
    assert decided == ["mm", "mm"]
    assert len(gpu.launched) == 2


@contextlib.contextmanager
def refusing(gpu):
    gpu.code = 201
    try:
        yield
    finally:
        gpu.code = 0


@contextlib.contextmanager
def listening(gpu):
    calls = triton.knobs.runtime.launch_exit_hook.calls
    calls.append(None)
    try:
        yield
    finally:
        calls.clear()


@contextlib.contextmanager
def filling(gpu):
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("context", [refusing, listening, filling])
def test_python_launches_where_the_driver_refuses_somebody_listens_or_torch_fills(decided, gpu, context):
    with switch() as report:
        A @ B
        with context(gpu):
            got = A @ B
        A @ B
    assert torch.equal(got, C_WANTED)
    assert (len(decided), report.taken) == (2, 1)


def test_python_launches_where_there_is_no_memory_for_a_workspace(decided, gpu):
    decided.ready.launch._bytes = 1 << 60
    with switch():
        A @ B
        assert torch.equal(A @ B, C_WANTED)
    assert len(decided) == 2
    assert not gpu.launched


@pytest.mark.parametrize("words", [[], [1], [3, 0, 2], [-1], [0, 0, 0, 0, 0, 0, 0], [1 << 40, 1]])
def test_words_that_are_no_launch(crossing, words):
    given = (ctypes.c_int64 * len(words))(*words)
    assert crossing._library.tritile_launch(given, len(words)) is None


def test_a_launch_of_too_many_buffers_is_pythons(decided, gpu):
    gpu.launched.clear()
    decided.ready.launch._offsets = [0] * 40
    with switch():
        A @ B
        A @ B
    assert len(decided) == 2
    assert not gpu.launched


def test_launches_that_are_never_freed_have_a_bound(decided, gpu, crossing, monkeypatch):
    monkeypatch.setattr("tritile.in_torch.crossing.MOST", len(crossing._launches) + 1)
    other = gpu.ready((19, 4))
    with switch():
        for a, ready in ((A, decided.ready), (A[1:], other)):
            decided.ready = ready
            for _ in range(3):
                a @ B
    assert decided == ["mm"] * 4  # the second is Python's each time
