"""tritile show, export, merge and clear: what is remembered."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tritile.cli import shared
from tritile.cli.shared import app, console, counted, device_of, number, print_json, print_table
from tritile.core.settings import cache_dir, shared_url, store_dir
from tritile.errors import InvalidValueError, NotTunedError, did_you_mean

if TYPE_CHECKING:
    from tritile.core.device import Device
    from tritile.tuner.store.trial import Trial

_FACTS = ("us", "spread", "registers", "spills", "shared", "error", "failure", "measured_utc")


@app.command(epilog=shared.examples("tritile show", "tritile show --target h200 --json"))
def show(
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="Only this decorated kernel: its qualified name, or a pattern. May be repeated."),
    ] = None,
    target: shared.Target = None,
    trials: Annotated[bool, typer.Option(help="Every trial, not only the best of each problem.")] = False,
    of_fleet: Annotated[
        bool, typer.Option("--shared", help="What the shared folder has of each GPU model, or of --target.")
    ] = False,
    as_json: shared.Json = False,
) -> None:
    """Show what is remembered of this GPU (or --target), and the tables and predictors that it uses.

    It lists the trials that count for this version: the best of each problem, or all of them.

    A kernel decorated with tritile.autotune has a line for each of its sources that was measured, with the
    number of problems and configs, and the config that wins most of the problems.
    """
    from tritile.choose import gpu_tables
    from tritile.choose.classes import MEASURED
    from tritile.core.problem import problem_to_dict
    from tritile.tuner.store.trials import store_of

    if of_fleet:
        from tritile.cli.fleet import show_folder

        if kernel or trials:
            raise InvalidValueError("--shared goes with neither --kernel nor --trials")
        return show_folder(device_of(target).slug if target else None, as_json)
    device = device_of(target)
    store, (found, others) = store_of(device), sorted_out(device)
    decorated = _decorated(found)
    if kernel:
        decorated = {name: decorated[name] for name in _named(kernel, decorated, f"on {device.name}")}
        found = [pair for pair in found if getattr(pair[1].problem, "kernel", None) in decorated]
    kernels = [_summary(name, *source) for name, sources in decorated.items() for source in sources.items()]
    remembered = found if trials else _bests(found)
    tables = [
        {"from": where, "gpu": made.device["name"], "triton": made.triton, "entries": len(made.entries)}
        for made, where in ([] if kernel else gpu_tables.serving(device))
    ]
    classes: dict[str, dict[str, Any]] = {}
    for name in () if kernel else MEASURED:
        if served := gpu_tables.predictor(name, device):
            classes[name] = shared.classes_of(served[0])[name] | {"from": served[1]}
    if as_json:
        listed = [
            {"problem": problem_to_dict(trial.problem), "config": trial.config.to_dict(), "source": digest}
            | {name: getattr(trial, name) for name in _FACTS}
            for digest, trial in remembered
        ]
        facts = {"gpu": device.name, "store": store.path, "kernels": kernels}
        return print_json(facts | {"remembered": listed, "tables": tables, "classes": classes})
    for each in tables:
        by = f", by triton {each['triton']}" if each["triton"] else ""
        console.print(f"table {each['from']}{by}: {each['entries']} entries")
    if not (tables or kernel):
        console.print(f"no table serves {device.name}")
    if classes:
        rows: list[dict[str, Any]] = [
            {"class": name, "configs": number(facts["configs"]), "sizes": number(facts["sizes"])}
            | {"slower": number(facts["mean"], ".1%"), "95%": number(facts["p95"], ".1%")}
            | {"by time": number(facts["by_time"], ".1%"), "from": facts["from"]}
            for name, facts in classes.items()
        ]
        print_table(rows, "predicted classes", ("from",))
        console.print(
            "slower: how much longer picks take than the fastest at sizes left out: mean, 95th percentile, "
            "and of the time of all"
        )
    if kernels:
        print_table([_cells(each) for each in kernels], "decorated kernels")
    several = {name for name, sources in decorated.items() if len(sources) > 1}
    lines = [
        {
            "problem": trial.problem.label
            + (f" (source {digest[:8]})" if getattr(trial.problem, "kernel", None) in several else ""),
            "us": number(trial.us, ".1f") if trial.us else trial.failure or "",
            "config": str(trial.config),
            "measured": trial.measured_utc[:10],
        }
        for digest, trial in remembered
    ]
    if lines:
        print_table(lines, "remembered")
    console.print(f"{shared.counted(len(remembered), 'measurement')} of {device.name} in {store.path}")
    if others:
        console.print(others)


def sorted_out(device: "Device") -> "tuple[list[tuple[str, Trial]], str]":
    """Return the trials that count: of this GPU, these versions and the current source of tritile's kernels.

    Each comes with its kernel's digest. The text says how many others there are and why they do not count.
    """
    from tritile.choose import aten
    from tritile.families import registry as families
    from tritile.tuner.store.trials import store_of

    found, others = [], Counter[str]()
    for facts, trial in store_of(device).all_trials():
        own = families.FAMILIES.get(trial.problem.op, {}).get(trial.config.family)
        differs = [
            name for name, value in facts.items() if name != "kernel" and value != getattr(device, name)
        ]
        if differs:
            name = differs[0]
            others[f"of {name} {facts[name]}, here {getattr(device, name)}"] += 1
        elif own is not None and facts["kernel"] != own.digest:
            others["of another version of their kernels"] += 1
        elif trial.config != aten.CONFIG:
            found.append((facts["kernel"], trial))
    reasons = "; ".join(f"{count} {why}" for why, count in others.most_common())
    return found, f"trials that do not count: {reasons}" if others else ""


def _bests(trials: "Iterable[tuple[str, Trial]]") -> "list[tuple[str, Trial]]":
    """Return the best trial of each problem by its key, as to Python problems of 1 and 1.0 are equal.

    Problems of two decorated kernels, or of two sources of one, are distinct.
    """
    from tritile.core.problem import KernelProblem, problem_key
    from tritile.tuner.store.trial import rank

    best: dict[tuple[str, str], tuple[str, Trial]] = {}
    for digest, trial in sorted(trials, key=lambda pair: rank(pair[1])):
        source = digest if isinstance(trial.problem, KernelProblem) else ""
        best.setdefault((source, problem_key(trial.problem)), (digest, trial))
    return list(best.values())


def _decorated(trials: "Iterable[tuple[str, Trial]]") -> "dict[str, dict[str, list[Trial]]]":
    """Return the trials of decorated kernels, by name and digest, the newest digest last."""
    from tritile.core.problem import KernelProblem
    from tritile.tuner.store.trials import moment

    found: dict[str, dict[str, list[Trial]]] = {}
    for digest, trial in sorted(trials, key=lambda pair: moment(pair[1].measured_utc)):
        if isinstance(trial.problem, KernelProblem):
            digests = found.setdefault(trial.problem.kernel, {})
            digests[digest] = [*digests.pop(digest, []), trial]
    return dict(sorted(found.items()))


def _winners(device: "Device") -> "dict[str, dict[str, list[Trial]]]":
    return _decorated(pair for pair in sorted_out(device)[0] if pair[1].works)


def _summary(name: str, digest: str, trials: "Sequence[Trial]") -> dict[str, Any]:
    """Summarise one source of a decorated kernel, for JSON; the newest trial comes last."""
    from tritile.core.problem import problem_key

    won = Counter(trial.config for _, trial in _bests((digest, trial) for trial in trials) if trial.works)
    winner, wins = won.most_common(1)[0] if won else (None, 0)
    return {
        "kernel": name,
        "source": digest,
        "problems": len({problem_key(trial.problem) for trial in trials}),
        "configs": len({trial.config for trial in trials}),
        "winner": winner and winner.to_dict(),
        "wins": wins,
        "measured_utc": trials[-1].measured_utc,
    }


def _cells(summary: dict[str, Any]) -> dict[str, Any]:
    from tritile.core.config import Config

    wins, problems, winner = summary["wins"], summary["problems"], summary["winner"]
    return {
        "kernel": summary["kernel"],
        "source": summary["source"][:8],
        "problems": number(problems),
        "configs": number(summary["configs"]),
        "winner": str(Config.from_dict(winner)) if winner else "none works",
        "wins": number(wins),
        "measured": summary["measured_utc"][:10],
    }


def _named(
    names: Iterable[str], there: Collection[str], where: str, advice: str = 'call it once in mode "tune"'
) -> list[str]:
    """Return which kernels of `there` names or patterns mean; without one, a name may begin with its module.

    Raises NotTunedError for one of which nothing is remembered.
    """
    meant = {
        name: [each for each in there if fnmatchcase(each, name)]
        or [each for each in there if name.endswith(f".{each}")]
        for name in names
    }
    if missing := [name for name, found in meant.items() if not found]:
        advice = f"there is {', '.join(sorted(there))}" if there else advice
        hint = did_you_mean(missing[0], there)
        raise NotTunedError(f"nothing is remembered of {', '.join(missing)} {where}{hint}: {advice}")
    return list(dict.fromkeys(chain.from_iterable(meant.values())))


@app.command(
    epilog=shared.examples(
        "tritile export --output my-gpu.json", "tritile export --kernel softmax --output kernels.json"
    )
)
def export(
    output: Annotated[
        Path | None,
        typer.Option(help="The table to write; default <gpu>.json, or kernels.json with --kernel."),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            help="Write the winners of this kernel, a name or a pattern of names in `tritile show`, for "
            "autotune(table=...): those of each of its sources. May be repeated."
        ),
    ] = None,
    target: shared.Target = None,
    replace: Annotated[bool, typer.Option(help="Replace a table that knows more, or another GPU's.")] = False,
) -> None:
    """Write the best remembered configs of this GPU as a table to ship, or to pin.

    A table named by `TRITILE_TABLE` takes precedence over everything measured on a machine.

    An existing file keeps its entries for problems that are not remembered. If it would lose entries, or is
    of another GPU, it is only replaced with --replace.

    With --kernel, it writes the winners of decorated kernels instead. An existing file of these keeps its
    other kernels, GPUs and problems.
    """
    from tritile.choose import table
    from tritile.families import registry as families
    from tritile.tuner.store.trials import store_of

    shared.check_output(output)
    device = device_of(target)
    path = output or Path("kernels.json" if kernel else f"{device.slug}.json")
    if kernel:
        if replace:
            raise InvalidValueError("--replace is for tritile's own operations, not for --kernel")
        return _export_kernels(kernel, device, path)
    made = table.from_store(store_of(device), device, families.digests())
    if path.exists() and not replace:
        old = table.read(path)
        made = table.completed(made, old)
        if old.device["name"] != device.name or len(made.entries) < len(old.entries):
            raise InvalidValueError(
                f"{path} holds {len(old.entries)} entries of {old.device['name']}; {len(made.entries)} of "
                f"{device.name} would stand in their place: --replace writes them"
            )
    if not made.entries:
        decorated, (_, others) = ", ".join(sorted(_winners(device))), sorted_out(device)
        advice = f" but of decorated kernels: --kernel writes {decorated}" if decorated else ""
        advice = advice or (f" that counts here; {others}" if others else ": tune it first")
        raise NotTunedError(f"nothing is remembered of {device.name}{advice}")
    path.parent.mkdir(parents=True, exist_ok=True)
    table.write(made, path)
    console.print(f"{len(made.entries)} entries written to {path}")


def _export_kernels(names: Sequence[str], device: "Device", path: Path) -> None:
    """Write the winners of decorated kernels to a new file or an existing one of their format."""
    from tritile.tuner.store import tables as kernel_table

    winners = _winners(device)
    names = _named(names, winners, f"on {device.name}")
    made = kernel_table.read(path) if path.exists() else kernel_table.KernelTable(path, {})
    lines = []
    for name in names:
        sources = winners[name].items()
        count = sum(
            made.add(device, digest, [trial for _, trial in _bests((digest, trial) for trial in trials)])
            for digest, trials in sources
        )
        of = f" of {len(sources)} sources" if len(sources) > 1 else ""
        lines.append(f"{name}: {counted(count, 'problem')}{of} of {device.name} written to {path}")
    made.write()
    lines.append(f"to adopt with it: tritile run --table {path} COMMAND")
    lines.append(f'@tritile.autotune(..., table=Path(__file__).with_name("{path.name}"))')
    console.print("\n".join(lines))


@app.command(epilog=shared.examples("tritile merge other/nvidia-h200.sqlite3 --target h200"))
def merge(
    files: Annotated[
        list[Path], typer.Argument(help="Stores of the same GPU model, or .gz of them, from other machines.")
    ],
    target: shared.Target = None,
) -> None:
    """Add the trials of other stores to this one; where both have one, the newer stays."""
    from tritile.tuner.store.trials import rows_of, store_of

    for path in files:
        rows_of(path)  # report an unreadable file before anything is added
    device = device_of(target)
    store = store_of(device)
    for path in files:
        with shared.working(str(path)):
            count = store.merge(path)
        console.print(f"{path}: {counted(count, 'trial')} added to {store.path}")
    if others := sorted_out(device)[1]:
        console.print(others)


@app.command(epilog=shared.examples("tritile clear", "tritile clear --kernel softmax --target h200 --yes"))
def clear(
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            help="Only the trials of this decorated kernel: its name in `tritile show`, or a pattern. May "
            "be repeated."
        ),
    ] = None,
    target: shared.Target = None,
    every: Annotated[bool, typer.Option("--all", help="What is remembered of every GPU.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Forget what was measured on this GPU (or --target): of all problems, or of one kernel.

    Tables that ship, or that you exported, stay. Without --yes it asks first.
    """
    from tritile.choose import gpu_tables
    from tritile.core.device import HOST
    from tritile.core.problem import KernelProblem
    from tritile.tuner.store.trials import Store, store_of

    if every and target:
        raise InvalidValueError("--all is for every GPU: leave --target away")
    shared.check_output(cache_dir(), folder=True, option="the folder of what is remembered,")
    if every:
        gpus = [path.stem for path in sorted(store_dir().glob("*.sqlite3"))]
        stores = [Store(dataclasses.replace(HOST, name=name)) for name in gpus]
        trained = [*cache_dir().glob("*.predictor.json"), *cache_dir().glob("*.sweeps/*")]
        where = f"in {cache_dir()}"
    else:
        device = device_of(target)
        stores, where = [store_of(device)], f"on {device.name}"
        trained = [gpu_tables.calibrated_path(device, what) for what in gpu_tables.WHAT]
        trained += gpu_tables.sweeps_path(device).glob("*")
    if kernel:
        problems = [trial.problem for store in stores for _, trial in store.all_trials()]
        there = {problem.kernel for problem in problems if isinstance(problem, KernelProblem)}
        kernel = _named(kernel, there, where, "nor of any other decorated kernel")
    what = f"the trials of {', '.join(kernel)}" if kernel else "the trials and predictors"
    if not (yes or (sys.stdin.isatty() and typer.confirm(f"Delete {what} {where}?"))):
        raise InvalidValueError(f"{what} {where} stay: --yes deletes them")
    count = sum(store.clear(name) for store in stores for name in kernel or (None,))
    for path in () if kernel else trained:
        path.unlink(missing_ok=True)
    console.print(f"{what} {where} deleted: {counted(count, 'trial')}")
    if shared_url():
        console.print(f"what {shared_url()} has stays there, and `tritile pull` takes it in again")
