"""tritile tune --calibrate: time the configs of classes, and train what predicts them."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tritile.choose import gpu_tables, pick, predictor
from tritile.choose.aten import versions
from tritile.choose.classes import MEASURED
from tritile.choose.gpu_tables import what_of
from tritile.choose.predictor import Predictor
from tritile.cli.shared import console, counted, interruptible, progress, say, unknown, working
from tritile.core.device import Device
from tritile.errors import FileError, TuningError, UnsupportedError
from tritile.families.space import legal_configs
from tritile.tune.calibrate.candidates import candidates
from tritile.tune.calibrate.draw import drawn
from tritile.tune.calibrate.files import Sweep, joined, read_sweep, write_sweep
from tritile.tune.calibrate.sweep import Row, ready, sweep
from tritile.tune.calibrate.train import fitted, usable

ALL = "all"
LIKELY = 300  # sizes from which candidates are chosen


def classes_of(names: Sequence[str]) -> list[str]:
    """Return the classes of these names, or all. Raises InvalidValueError for an unknown name."""
    for name in names:
        if name not in (*MEASURED, ALL):
            raise unknown("--calibrate", name, (ALL, *MEASURED))
    return list(MEASURED) if ALL in names else list(dict.fromkeys(names))


def calibrate(
    names: Sequence[str],
    device: Device,
    sizes: int,
    count: int,
    seconds: float,
    folder: Path,
    sweeps: Path,
) -> list[Predictor]:
    """Time configs of classes on the current GPU, and write what predicts them to `folder`; return that.

    `count` configs are timed at `sizes` drawn sizes, for at most `seconds` a class. Times go to the folder
    `sweeps`, a file a class, with those that are there; predictors are trained by all of them.
    """
    classes = []
    for name in names:
        try:
            legal_configs(drawn(name, 1, "candidates")[0], device)
            classes.append(name)
        except UnsupportedError as error:
            say(f"{name} is left out: {error}")
    if not classes:
        raise UnsupportedError(f"--calibrate: {device.name} runs none of {', '.join(names)}")
    with interruptible() as keep_on, ThreadPoolExecutor(1) as ahead:
        # Classes are compiled one after the other, while those before are timed.
        compiled = {name: ahead.submit(_compiled, name, device, sizes, count) for name in classes}
        for name in classes:
            rows = compiled[name].result()
            begun = time.monotonic()
            timed = list[Row]()
            try:
                with progress() as bar:
                    for row in bar.track(rows(), total=sizes, description=name):
                        timed.append(row)
                        if time.monotonic() - begun > seconds or not keep_on():
                            break
            finally:  # what was measured is kept, whatever happens
                if timed:
                    path = sweeps / f"{name}.jsonl"
                    write_sweep(path, joined(_known(path, device), timed), device)
            console.print(f"{name}: {len(timed)} sizes in {time.monotonic() - begun:.0f} s")
            if not keep_on():
                ahead.shutdown(cancel_futures=True)
                break
    found = [_trained(what, device, folder, sweeps) for what in dict.fromkeys(map(what_of, classes))]
    pick.forget()
    return [made for made in found if made is not None]


def _known(path: Path, device: Device) -> Sequence[Row]:
    """Return what a file has of this GPU and these kernels. A file that is no sweep is replaced."""
    try:
        before = read_sweep(path) if path.exists() else None
    except FileError as error:
        say(str(error))
        return ()
    return before.rows if before and before.is_current and before.device.name == device.name else ()


def _trained(what: str, device: Device, folder: Path, sweeps: Path) -> Predictor | None:
    """Train the predictor of products or of permutations by all sweeps of a folder, and write it."""
    paths = [sweeps / f"{name}.jsonl" for name in MEASURED if what_of(name) == what]
    known = [(path, _known(path, device)) for path in paths]
    found = []
    for path, rows in known:
        try:
            found.append(usable(Sweep(path.stem, device, rows)))
        except TuningError as error:
            if rows:
                say(str(error))
    if not found:
        say(f"{what}: too few sizes were timed to predict others")
        return None
    with working(f"training by {counted(sum(len(each.rows) for each in found), 'size')}"):
        made = fitted(found, versions())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / gpu_tables.calibrated_path(device, what).name
    predictor.write(made, path)
    for name, one in made.classes.items():
        loss = one.loss
        torch_too = f"; torch's times are predicted within {loss.torch:.1%}" if loss.torch else ""
        console.print(
            f"{name}: {len(one.columns)} configs; at {loss.sizes} sizes left out picks lost {loss.mean:.2%} "
            f"(mean), {loss.p95:.2%} (95%), {loss.by_time:.2%} of all time{torch_too}"
        )
    console.print(f"written to {path}")
    return made


def _compiled(name: str, device: Device, sizes: int, count: int) -> Callable[[], Iterator[Row]]:
    """Compile candidates; return a function that times them, size by size.

    The sizes are not those by which the candidates were chosen.
    """
    likely, problems = drawn(name, LIKELY, "candidates"), drawn(name, sizes, "sizes")
    found = gpu_tables.predictor(name, device)
    earlier = found[0].configs(name) if found else []
    configs = candidates(name, likely, device, earlier, gpu_tables.shipped(device), count)
    console.print(f"{name}: {len(configs)} configs at {sizes} sizes")
    chooser = ready(problems, configs, device, say)
    return lambda: sweep(problems, chooser, device, say)
