"""Freeze what tritile picks, compiles and answers today, so that a change that was not meant shows.

    python tests/freeze.py --check            compare with tests/frozen.json; exit status 1 if any differs
    python tests/freeze.py                    write tests/frozen.json anew
    python tests/freeze.py picks answers      either, of these parts alone

| part | what | by |
| --- | --- | --- |
| picks | source and config of 2,000 drawn calls on each GPU with a measured table | frozen_picks.py |
| kernels | digests of the machine code of some 100 kernels, compiled for an H200 | frozen_kernels.py |
| answers | what every operation answers to host tensors, in the interpreter | frozen_answers.py |

A commit that changes a part on purpose writes that part anew, and says in its message why that many changed.
Picks and kernels are those of one version of Triton, which the file names.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "frozen.json"
SHOWN = 6
PARTS = "picks", "kernels", "answers"


def frozen() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def picks_now(gpus: tuple[str, ...] = (), every: int = 1) -> dict[str, str]:
    """The pick of each drawn call, or each nth, by GPU and call; of all GPUs unless some are named."""
    import tritile
    from tests import frozen_picks

    tritile.forget()
    calls = list(frozen_picks.calls())[::every]
    devices = {gpu: tritile.target_device(gpu) for gpu in gpus or frozen_picks.GPUS}
    return {
        f"{gpu} {frozen_picks.label(call)}": frozen_picks.pick(call, device)
        for gpu, device in devices.items()
        for call in calls
    }


def kernels_now(of: Mapping[str, Any]) -> dict[str, str]:
    """The machine code of each call by each of these configs."""
    from tests import frozen_kernels

    pairs = ((name, text) for name, texts in of.items() for text in texts)
    return {f"{name} | {text}": frozen_kernels.machine_code(name, text) for name, text in pairs}


def answers_now() -> dict[str, Any]:
    from tests import frozen_answers

    return {name: frozen_answers.answer(name) for name in frozen_answers.CASES}


def differences(
    part: str, old: Mapping[str, Any], new: Mapping[str, Any], same: Callable[[Any, Any], bool] = str.__eq__
) -> str:
    """What changed of a part in a few lines, "" if nothing did."""
    pairs = {name: (old.get(name), new.get(name)) for name in {**old, **new}}
    changed = {name: pair for name, pair in pairs.items() if None in pair or not same(*pair)}
    if not changed:
        return ""
    lines = [f"{part}: {len(changed)} of {len(old)} changed"]
    for name, (before, after) in list(changed.items())[:SHOWN]:
        lines += [f"  {name}", f"    frozen {str(before)[:300]}", f"    now    {str(after)[:300]}"]
    lines += [f"  and {len(changed) - SHOWN} more"] * (len(changed) > SHOWN)
    return "\n".join([*lines, f"If that is meant: python tests/freeze.py {part}"])


def changed_picks(*gpus: str, every: int = 1) -> str:
    """What changed of the picks of some GPUs, by default of all; of each nth call."""
    from tests import frozen_picks

    old, new = frozen()["picks"], picks_now(gpus, every)
    labels = [frozen_picks.label(call) for call in frozen_picks.calls()]
    names = [f"{gpu} {label}" for gpu in frozen_picks.GPUS for label in labels]
    if old["calls"] != _digest(names):
        return "picks: tests/frozen_picks.py draws other calls than those that were frozen"
    before = [old["different"][int(number)] for number in old["picks"].split()]
    pairs = zip(names, before, strict=True)
    return differences("picks", {name: pick for name, pick in pairs if name in new}, new)


def changed_kernels(of: Mapping[str, Any] | None = None) -> str:
    """What changed of the kernels of these configs, by call; by default of all that are frozen."""
    kept = frozen()["kernels"]
    old = {f"{name} | {text}": kept[name][text] for name, texts in (of or kept).items() for text in texts}
    return differences("kernels", old, kernels_now(of or kept))


def changed_answers() -> str:
    from tests import frozen_answers

    return differences("answers", frozen()["answers"], answers_now(), frozen_answers.alike)


def write(parts: list[str]) -> None:
    import triton

    from tests import frozen_kernels

    found = frozen() if FILE.exists() else {"triton": triton.__version__}
    if parts != ["answers"]:
        if found["triton"] != triton.__version__ and not {"picks", "kernels"} <= set(parts):
            sys.exit(f"{FILE.name} is of triton {found['triton']}: write picks and kernels together")
        found["triton"] = triton.__version__
    if "picks" in parts:
        picks = picks_now()
        different = sorted(set(picks.values()))  # each one once, and for each call its number among them
        at = {text: str(i) for i, text in enumerate(different)}
        numbers = " ".join(at[text] for text in picks.values())
        found["picks"] = {"calls": _digest(list(picks)), "different": different, "picks": numbers}
    if "kernels" in parts:
        chosen = frozen_kernels.chosen()
        code = kernels_now(chosen)
        found["kernels"] = {
            name: {text: code[f"{name} | {text}"] for text in texts} for name, texts in chosen.items()
        }
    if "answers" in parts:
        found["answers"] = answers_now()
    lines = [f' "triton": {json.dumps(found["triton"])}']
    for part in PARTS:  # an entry a line, as what git shows
        entries = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in found.get(part, {}).items())
        lines.append(f" {json.dumps(part)}: {{\n" + ",\n".join(entries) + "\n }")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="picks, kernels, answers; default: all")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    parts, status = given.parts or list(PARTS), 0
    if "answers" in parts and os.environ.get("TRITON_INTERPRET") != "1":  # read as Triton is imported
        words = [sys.executable, __file__, "answers", *["--check"] * given.check]
        status = subprocess.run(words, env=os.environ | {"TRITON_INTERPRET": "1"}).returncode
        parts.remove("answers")
        if not parts or status > 1 or (status and not given.check):
            sys.exit(status)
    sys.path.insert(0, str(ROOT))
    for name in [name for name in os.environ if name.startswith("TRITILE_")]:
        del os.environ[name]
    os.environ["TRITILE_BACKENDS"] = "triton"  # what is frozen is tritile's own
    import triton

    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".triton" / triton.__version__))
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITILE_CACHE_DIR"] = empty  # no store of the user's
        if not given.check:
            write(parts)
            return
        if frozen()["triton"] != triton.__version__ and set(parts) != {"answers"}:
            sys.exit(f"{FILE.name} is of triton {frozen()['triton']}, this is {triton.__version__}")
        changed = {"picks": changed_picks, "kernels": changed_kernels, "answers": changed_answers}
        found = [text for part in parts if (text := changed[part]())]
    print("\n".join(found) or f"nothing changed of {', '.join(parts)}")
    sys.exit(bool(found) or status)


if __name__ == "__main__":
    main()
