"""Call it, as `tritile.tune`, to measure the configs of one call on the GPU and remember the best.

    tritile.tune(tritile.matmul, a, b)  # an operation, or its name, and the arguments of a call
    tritile.tune(problem)  # the problem of a plan: tritile.plan(...).problem
    tritile.tune(softmax, x, out, 300, grid=grid)  # a kernel that tritile.autotune decorates

`exhaustive=True` tries every config, `budget=` limits the seconds, and `force=True` measures again what is
remembered. The result is a `TuneResult`, which prints as a table. See `help(tritile.lab.tune.tune)`.

How a problem of tritile's own operations is measured:

    now           tunes many problems, or one at its first call in mode "tune"
    spread        measures one while its calls go on, in mode "spread"
    subject       makes a problem's operands, and checks answers
    calibrate     times configs of a class of problems, and trains what predicts them
    suites        lists of problems

`tritile.tuner` searches and measures.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Tune(ModuleType):
    """This package which, when called, is the function of the same name."""

    def __call__(self, what: Any, *args: Any, **options: Any) -> Any:
        from tritile.lab.tune import tune

        return tune(what, *args, **options)

    def __reduce__(self) -> Any:
        """Copy and pickle by name, as functions do."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Tune
