"""A fork server that starts early, as Triton is imported under adoption, and waits until it is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tritile
from tritile.tuner.measure import server, workers

ROOT = Path(tritile.__file__).parents[1]


@pytest.fixture
def capable(monkeypatch, tmp_path):
    """A process that seems to have a GPU, and whose notes go to a new folder."""
    monkeypatch.setattr(server, "_GPU_FILES", ("/",))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(server.atexit, "register", lambda function: None)
    for name in ("_early", "_quiet"):
        monkeypatch.setattr(server, name, None)
    monkeypatch.setattr(server, "_measures", False)
    for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "TRITILE_MODE", "TRITILE_ADOPT_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def starts(capable, monkeypatch):
    """How many servers were started; none is."""
    made = []

    class Process:
        def poll(self):
            return None

        kill = wait = poll

    monkeypatch.setattr(server, "started", lambda: made.append(0) or (Process(), os.dup(2)))
    return made


def run_again():
    server._note()
    if server._early is not None:
        os.close(server._early[1])
    server._early = server._quiet = None
    server._measures = False


def test_only_a_program_that_may_measure_starts_one(starts, monkeypatch):
    for name, value in (
        ("CUDA_VISIBLE_DEVICES", ""), ("TRITON_INTERPRET", "1"), ("TRITILE_MODE", "cached"),
        ("TRITILE_ADOPT_MODE", "strict"),
    ):  # fmt: skip
        with monkeypatch.context() as within:
            within.setenv(name, value)
            server.start_early()
    with monkeypatch.context() as within:
        within.setattr(server, "_GPU_FILES", ("/nowhere",))
        server.start_early()
    server.start_early("cached")  # of `tritile.adopt`
    assert starts == []
    server.start_early()
    server.start_early("tune")
    assert len(starts) == 1


def test_the_next_run_starts_none_if_nothing_was_measured(starts):
    server.start_early()
    run_again()
    server.start_early()
    assert len(starts) == 1
    _, number = server.take()  # this run measures after all
    os.close(number)
    assert len(starts) == 2
    run_again()
    server.start_early()
    assert len(starts) == 3


def test_another_program_starts_its_own(starts, monkeypatch):
    server.start_early()
    run_again()
    monkeypatch.setattr(sys, "argv", ["other.py"])
    server.start_early()
    assert len(starts) == 2


def test_nothing_starts_where_nothing_can_be_kept(starts, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "file"))
    server.start_early()
    assert starts == []


def test_workers_have_what_the_program_changed_meanwhile(capable, monkeypatch, tmp_path):
    server.start_early()
    (process, _) = server._early
    (tmp_path / "late_module.py").write_text(
        "import os\ndef look(): return os.getcwd(), os.environ['LATE']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LATE", "yes")
    monkeypatch.chdir(tmp_path)
    import late_module

    with workers.WorkerPool(compilers=1) as pool:
        assert pool.submit(late_module.look).result() == (str(tmp_path), "yes")
        assert pool._server is process
    assert server._early is None


def test_one_that_died_is_replaced(capable):
    server.start_early()
    (process, number) = server._early
    process.kill()
    process.wait()
    is_ours = os.fstat(number).st_ino
    with workers.WorkerPool(compilers=1) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
        assert pool._server is not process
        assert pool._connection.fileno() != number or os.fstat(number).st_ino != is_ours


def test_a_forked_child_leaves_it_alone(capable):
    server.start_early()
    (process, number) = server._early
    child = os.fork()
    if child == 0:
        is_open = Path(f"/proc/self/fd/{number}").exists()
        os._exit(not is_open and server._early is server._quiet is None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    server._note()  # at exit
    assert process.poll() is not None
    os.close(number)


def test_it_ends_with_its_program(tmp_path):
    """Also one that is killed."""
    code = (
        "import os, signal\n"
        "from tritile.tuner.measure import server\n"
        "server._GPU_FILES, os.cpu_count = ('/',), lambda: 8\n"
        "server.start_early()\n"
        "print(server._early[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {n: v for n, v in os.environ.items() if not n.startswith(("TRITILE", "TRITON"))}
    env |= {"TRITILE_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    pid = int(done.stdout)
    state = Path(f"/proc/{pid}/stat")
    while state.exists() and ") Z " not in state.read_text():  # it ends as soon as torch is imported
        pass


@pytest.mark.parametrize(("name", "value"), [("executable", None), ("executable", ""), ("frozen", True)])
def test_a_program_that_is_no_python_starts_none(capable, monkeypatch, name, value):
    """Embedded or frozen: `sys.executable` is nothing, or the program, which would start itself."""
    monkeypatch.setattr(sys, name, value, raising=False)
    monkeypatch.setattr(server.subprocess, "Popen", lambda *_, **__: pytest.fail("it starts something"))
    server.start_early()
    assert server._early is None
    with pytest.raises(OSError, match="no Python"):
        server.take()
