"""Be a rank of `tritile tune` as torchrun starts it, on a made-up H200 that times kernels by a formula."""

import functools
import os
import sys

from tests.unit.fake_subjects import Formula
from tritile.cli import tune
from tritile.core.device import target_device
from tritile.tune.measure.child import ForkServer
from tritile.tune.measure.tasks import Rules
from tritile.tune.shards import Place, Shards
from tritile.tune.subject import problem as subjects
from tritile.tune.suites import parse_shape

H200 = target_device("nvidia-h200")
CASES = [parse_shape(f"64x64x{64 * k}", dtype="float16") for k in range(1, 9)]
LOST_S = 2.0


def enter_rank(environment, told):
    """Take part as one of the ranks, from a fresh process; what is printed goes to a file."""
    os.environ.update(environment)
    with told.open("w") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())
    subjects.ProblemSubject = Formula
    tune.Shards = functools.partial(Shards, lost_s=LOST_S)
    wish = tune._Wish(None, True, 1, Rules(), None, ForkServer(forked=True))
    sys.exit(tune._tune_shared([case.problem for case in CASES], H200, wish, Place.from_environment()))
