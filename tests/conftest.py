"""What every test gets: a store of its own, no mode from outside, and a skip where a GPU is missing.

Tests are two processes. With TRITON_INTERPRET=1 `triton.jit` makes kernels that Triton's interpreter runs:
such a process collects the files that say `pytestmark = pytest.mark.interpreted`. One without it collects
all others, whose kernels are compiled. `make test` runs both.
"""

import functools
import gc
import multiprocessing
import os
import re
import sys
from pathlib import Path

import pytest

for _library in ("OMP", "OPENBLAS"):  # small products, several test processes: one thread each
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import torch  # noqa: E402
import triton  # noqa: E402

# What tests compile is kept from run to run: Triton's own keys hold a kernel's source and the compiler's.
KEPT = Path(__file__).parents[1] / ".triton"
os.environ.setdefault("TRITON_CACHE_DIR", str(KEPT / triton.__version__))
MATMUL_SETTINGS = (
    "fp32_precision",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)
OTHER_TARGETS = {"sm_80", "sm_100", "gfx942"}  # beside Hopper, for which `make test` compiles
INTERPRETING = bool(triton.knobs.runtime.interpret)
_INTERPRETED = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.interpreted\b", re.MULTILINE)
pytest.register_assert_rewrite("tests.cases")
if INTERPRETING:
    pytest_plugins = ["tests.interpreting"]


@functools.cache
def is_interpreted(path: Path) -> bool:
    return bool(_INTERPRETED.search(path.read_text(encoding="utf-8")))


def is_of_other_process(path: Path) -> bool:
    return path.name.startswith("test_") and path.suffix == ".py" and is_interpreted(path) != INTERPRETING


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files of the other process, and GPU tests without a GPU, but for files that are named."""
    gpu_tests = collection_path.parent == Path(__file__).parent / "gpu"
    without = INTERPRETING or not torch.cuda.is_available()
    return True if (gpu_tests and without) or is_of_other_process(collection_path) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", default="1/1", help="run the I-th of N parts of the tests")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    named = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    files = {file for path in named for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    if left := sum(map(is_of_other_process, files)):
        how = "without TRITON_INTERPRET" if INTERPRETING else "with TRITON_INTERPRET=1"
        terminalreporter.write_line(f"{left} test files are left, which run {how}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marked = item.get_closest_marker("interpreted") is not None
        if marked != is_interpreted(item.path):
            raise pytest.UsageError(
                f"{item.nodeid}: a whole file is interpreted: pytestmark = pytest.mark.interpreted"
            )
    if left := [item for item in items if is_of_other_process(item.path)]:  # of files that are named
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not is_of_other_process(item.path)]
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        targets = {str(given.get(argument)) for argument in ("name", "target")}
        if item.path.parent.name == "kernels" and targets & OTHER_TARGETS:
            item.add_marker(pytest.mark.stacks)
    number, parts = map(int, config.getoption("shard").split("/"))
    if left := [item for i, item in enumerate(items) if i % parts != number - 1]:
        config.hook.pytest_deselected(items=left)
        items[:] = items[number - 1 :: parts]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # not item.keywords, which names folders too
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "inf")  # however slow the machine is
    monkeypatch.setenv("TRITILE_BACKENDS", "triton")  # a test that torch alone would pass proves nothing
    for name in ("TRITILE_MODE", "TRITILE_BATCH_INVARIANT", "TRITILE_COMMIT", "TRITILE_SHARED"):
        monkeypatch.delenv(name, raising=False)
    if (sync := sys.modules.get("tritile.tuner.sync")) is not None:
        sync._notes.clear()
        sync._agreed.clear()  # which `tritile.forget` leaves, as other ranks have it too


@pytest.fixture
def cuda_matmul():
    """torch.backends.cuda.matmul, whose settings are restored.

    `monkeypatch` deletes at its end what an object's `__dict__` lacked, and these settings live in C++ alone.
    """
    settings = torch.backends.cuda.matmul
    before = {name: getattr(settings, name) for name in MATMUL_SETTINGS}
    yield settings
    for name, value in before.items():
        setattr(settings, name, value)


@pytest.fixture(scope="session")
def server():
    """Starts ranks: processes that are fresh but for torch, which takes seconds to import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.helpers_for_fork_servers", "tests.unit.helpers_for_parallel"])
    return context


@pytest.fixture
def uncollected():
    """Nothing is freed by the garbage collector: what should be free has no reference left."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
