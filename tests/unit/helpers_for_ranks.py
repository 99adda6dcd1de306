"""Be a rank of `tritile tune` as torchrun starts it, on a made-up H200 that times kernels by a formula."""

import os
import sys

from tests.unit.fake_subjects import Formula
from tests.unit.helpers_for_fork_servers import QuickWorkshop
from tritile import cli
from tritile.cli import shared, tune
from tritile.core.device import target_device
from tritile.tune.subject import problem as subjects
from tritile.tune.suites import parse_shape

H200 = target_device("nvidia-h200")
SHAPES = [f"64x64x{64 * k}" for k in range(1, 7)]
PROBLEMS = [parse_shape(shape, dtype="float16").problem for shape in SHAPES]


def enter_rank(rank, ranks, folder):
    """Tune as one of the ranks of a host, from a fresh process; what is printed goes to a file."""
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for own, value in zip(names, (rank, ranks), strict=True):
        os.environ.update(dict.fromkeys(own, str(value)))
    os.environ["TRITILE_CACHE_DIR"] = str(folder)
    with (folder / f"told-{rank}").open("w") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())
    subjects.ProblemSubject, tune.Workshop = Formula, QuickWorkshop
    shared.gpu_here = lambda: H200
    tune.now.time_torch = lambda *asked: None
    cli.app(["tune", *SHAPES, "--dtype", "float16"], prog_name="tritile")
