"""Make portfolios of what was swept, and tell what they lose: python tuning/portfolios.py FILE.jsonl.gz ...

    python tuning/portfolios.py tuning/sweeps/*.jsonl.gz [--table tritile/tables/nvidia-h200.json] [--least 6]

A file is what `tritile tune --calibrate NAME --sweeps FOLDER` wrote, or tuning/permutations.py, gzipped, and
is named after its class.
Of two files of a class the times of the second replace those of the first; others of the first stay. Classes
of which no file is given stay as they are in the table. The shipped table of the H200 is made of
tuning/sweeps/*.gz and then tuning/sweeps/more/*.gz, the H100's of tuning/sweeps/h100/*.gz and then
tuning/sweeps/h100/more/*.gz, whose sizes were timed by the 24 configs that the portfolio before put first.
Each quarter of the sizes is tried with what the others choose and fit. Told is what the pick, the fastest of
the portfolio, and the model's pick of what was timed lose to the fastest config that was timed; what picks
lose by the formula alone and with corrections; and what the fastest that was timed loses, by the model, to
the best of all configs. `--least`: of sizes that take so many microseconds or more. `--table`: a table to put
what all sizes give in, or a new one: what predicts torch's times; and of each class its portfolio, where that
is of enough sizes and its picks, with what was not timed counted against them, lose less than the model's.
"""

import argparse
import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import problem_from_dict
from tritile.families.registry import FAMILIES, digests
from tritile.families.space import illegal
from tritile.planning import aten, model, table
from tritile.planning.classes import MEASURED
from tritile.tune.calibrate import fit
from tritile.tune.calibrate.run import LeftOut, Measured, likely
from tritile.tune.calibrate.sweep import Row

ENOUGH = 100  # sizes of a portfolio
ASKED = 100  # sizes at which the model is asked for the best of all configs, which takes 0.2 s
TOGETHER = (("bf16_nn", "bf16_nt"), ("unaligned_16bit",), ("fp8",), ("int8",))  # torch's times in one fit


def read(path: Path, least: float) -> tuple[Device, list[Row]]:
    """The GPU and the sizes of a file, without times of configs that are illegal now."""
    head, *lines = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
    configs = [Config.from_dict(each) for each in head["configs"]]
    device, rows = Device.from_dict(head["device"]), []
    for line in lines:
        problem = problem_from_dict(line["problem"])
        timed = {configs[int(i)]: us for i, us in line["us"].items()}
        times = {config: us for config, us in timed.items() if illegal(config, problem, device) is None}
        if times and min(times.values()) >= least:
            rows.append(Row(problem, times, line["torch_us"]))
    return device, rows


def read_all(paths: Iterable[Path], least: float) -> dict[str, tuple[Device, list[Row]]]:
    """The GPU and the sizes of each class, by its name."""
    found: dict[str, tuple[Device, list[Row]]] = {}
    for path in paths:
        name, (device, rows) = path.name.partition(".")[0], read(path, least)
        known = {row.problem: row for row in found[name][1]} if name in found else {}
        for row in rows:
            before = known.get(row.problem, row)
            known[row.problem] = row._replace(times={**before.times, **row.times})
        found[name] = device, [*known.values()]
    return found


def models_pick(row: Row, device: Device) -> float:
    """By what share the config that the model picks of those timed takes longer than the fastest."""
    pick = model.likeliest(row.times, row.problem, device)
    return row.times[pick] / min(row.times.values()) - 1


def lacking(row: Row, device: Device) -> float:
    """By what share the best of the configs that were timed takes longer than of all, both as predicted."""
    timed = min(model.predict_us(config, row.problem, device) for config in row.times)
    return timed / min(likely(row.problem, device).values()) - 1


def timed_torch(
    names: tuple[str, ...],
    found: dict[str, tuple[Measured, LeftOut]],
    device: Device,
    versions: dict[str, str],
) -> aten.AtenTimes | None:
    """What predicts torch's times for these classes; None where none of them was swept."""
    parts = [found[name] for name in names if name in found]
    if not parts:
        return None
    problems = [problem for measured, _ in parts for problem in measured.problems]
    us, picks, predicted = (
        torch.cat(each)
        for each in zip(*((m.torch_us, out.corrected, out.predicted) for m, out in parts), strict=True)
    )
    timed = ~us.isnan()
    rows = [problem for problem, good in zip(problems, timed.tolist(), strict=True) if good]
    made = fit.aten_times(names, rows, us[timed], device, versions, picks[timed], predicted[timed])
    print(f"torch at {', '.join(names)}: predicted within {made.error:.1%}, margin {made.margin}")
    return made


def told(shares: torch.Tensor) -> str:
    mean = float(shares.log1p().mean().expm1())
    median, p95 = (float(shares.quantile(q)) for q in (0.5, 0.95))
    return f"{mean:.2%} on the geometric mean, {median:.2%} (median), {p95:.2%} (95%)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--table", type=Path)
    parser.add_argument(
        "--versions",
        type=json.loads,
        default={"torch": "2.11.0+cu130", "cublas": "13.1.0.3"},
        help="of torch and cuBLAS, as they were swept",
    )
    parser.add_argument("--least", type=float, default=0.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # sums then have one order, and a repeat gives the same bytes
    swept = read_all(asked.files, asked.least)
    device = next(iter(swept.values()))[0]
    old = table.Table(device.to_dict(), digests(), ())
    if asked.table:
        old = table.read(asked.table) if asked.table.exists() else old
        if others := {each.name for each, _ in swept.values()} - {old.device["name"]}:
            parser.error(f"{asked.table} is of {old.device['name']}, sweeps are of {', '.join(others)}")
    made, torchs = {}, {}
    for name, (device, rows) in swept.items():
        measured = Measured(name, rows, device)
        left_out = measured.left_out()
        torchs[name] = measured, left_out
        pick, best = measured.lost(left_out.picks), measured.lost(left_out.fastest)
        before = torch.tensor([models_pick(row, device) for row in rows], dtype=torch.float64)
        print(f"{name}, {len(pick)} sizes: the pick loses {told(pick)}")
        for how, us in (("by the formula alone", left_out.alone), ("with corrections", left_out.corrected)):
            print(f"  {how} {told(measured.lost(us))}")
        print(f"  the portfolio {told(best)}")
        print(f"  the model's pick {told(before)}")
        ratios = measured.torch_us[:, None] / torch.stack([measured.fastest, left_out.picks], 1)
        if ratios.isfinite().any():
            by_fastest, by_pick = ratios.log().nanmean(0).exp().tolist()
            print(f"  torch's time by the fastest config's {by_fastest:.3f}, by the pick's {by_pick:.3f}")
        some = rows[:: -(-len(rows) // ASKED)]
        lacks = torch.tensor([lacking(row, device) for row in some], dtype=torch.float64)
        print(f"  what was timed, by the model at {len(some)} sizes, {told(lacks)}")
        losses = [each.log1p().mean() for each in (pick, lacks, before)]
        good = len(pick) >= ENOUGH and losses[0] + losses[1] < losses[2]
        made[name] = measured.portfolio(left_out) if good and asked.table else None
    times = [found for names in TOGETHER if (found := timed_torch(names, torchs, device, asked.versions))]
    if asked.table:
        portfolios = {name: each for name, each in (old.portfolios | made).items() if each is not None}
        labels = {
            FAMILIES[MEASURED[name].op][config.family].label
            for name, each in portfolios.items()
            for config in each.configs
        }
        own = {label: digest for label, digest in digests().items() if label in labels}
        kernels = own | dict(old.kernels)
        refitted = {name for each in times for name in each.classes}
        times += [each for each in old.aten if refitted.isdisjoint(each.classes)]
        table.write(replace(old, kernels=kernels, portfolios=portfolios, aten=tuple(times)), asked.table)


if __name__ == "__main__":
    main()
