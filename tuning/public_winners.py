"""Compare the model's picks with winners that vLLM publishes, on GPUs that it was not fitted to.

    python tuning/public_winners.py           # print the scores; no GPU is asked, a minute of one core
    python tuning/public_winners.py --write   # and write public_scores.json and docs/other_gpus.md

public_winners.json beside this has the winners, with their source and licence. A test compares the page with
what the two committed files say: write them anew when constants of the model change.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from operator import eq
from pathlib import Path
from typing import Any, Final

from benchmark_tables import table
from tritile.choose import waves
from tritile.core.config import Config
from tritile.core.device import TARGETS, Device
from tritile.core.problem import MatmulProblem
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal, legal_configs

HERE = Path(__file__).parent
WINNERS = HERE / "public_winners.json"
SCORES = HERE / "public_scores.json"
PAGE = HERE.parent / "docs" / "other_gpus.md"
TEMPLATE = HERE / "pages" / "other_gpus.md"
FAMILY: Final = "tile"
FEW: Final = 64  # rows, up to which memory bounds most of these products
SEARCHED: Final = {  # what the published search tries
    "BLOCK_M": (16, 32, 64, 128, 256), "BLOCK_N": (32, 64, 128, 256), "BLOCK_K": (64, 128),
    "num_warps": (4, 8), "num_stages": (2, 3, 4, 5),
}  # fmt: skip
FIXED: Final = ((128, 128), (64, 128))  # blocks of models that know nothing; the second is vLLM's default


# By the names in the published files. Peak figures as the makers' datasheets give them.
DEVICES: Final = {
    "NVIDIA_A100-SXM4-80GB": TARGETS["sm_80"],
    "NVIDIA_A800-SXM4-80GB": replace(TARGETS["sm_80"], name="NVIDIA A800-SXM4-80GB"),
    "NVIDIA_L40S": TARGETS["nvidia-l40s"],
    "NVIDIA_GeForce_RTX_4090": TARGETS["nvidia-geforce-rtx-4090"],
    "NVIDIA_H100_80GB_HBM3": TARGETS["sm_90"],
    "NVIDIA_H200": TARGETS["nvidia-h200"],
    "NVIDIA_H20": replace(TARGETS["sm_90"], name="NVIDIA H20", processors=78, memory_gbps=4000.0),
    "NVIDIA_B200": TARGETS["sm_100"],
    "NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition": Device(
        "NVIDIA RTX PRO 6000", "cuda", 120, 188, 128 << 20, 101376, 2.6, 1792.0
    ),
    "AMD_Instinct_MI300X": TARGETS["gfx942"],
    "AMD_Instinct_MI325X": replace(TARGETS["gfx942"], name="AMD Instinct MI325X", memory_gbps=6000.0),
}
SHORT: Final = {
    name: name.removeprefix("NVIDIA_").removeprefix("GeForce_").removeprefix("AMD_Instinct_")
    .split("-")[0].split("_80GB")[0].split("_Blackwell")[0].replace("_", " ")
    for name in DEVICES
}  # fmt: skip
PAIRS: Final = (
    ("A100", "A800"), ("MI300X", "MI325X"), ("H100", "H200"), ("H200", "H20"), ("H200", "B200"),
    ("H200", "A100"), ("H200", "MI300X"), ("B200", "MI300X"),
)  # fmt: skip
Blocks = tuple[int, int]
Winners = dict[str, dict[tuple[int, int, int], list[int | None]]]  # by GPU, and m, n and k
Score = dict[str, Any]


def winners(path: Path = WINNERS) -> Winners:
    """Return the published BLOCK_M, BLOCK_N, BLOCK_K, warps and stages of each GPU and size."""
    found: Winners = {}
    for each in json.loads(path.read_text())["tables"]:
        own = found.setdefault(SHORT[each["gpu"]], {})
        for m, winner in each["winners"].items():
            own[int(m), each["n"], each["k"]] = winner
    return found


def problem_of(m: int, n: int, k: int, dtype: str) -> MatmulProblem:
    """Pose the product that was searched, without its scales: NT, of fp8 or int8."""
    if dtype.startswith("int8"):
        return MatmulProblem(1, m, n, k, "int8", "bfloat16", b_layout="column")
    return MatmulProblem(1, m, n, k, "float8_e4m3fn", "bfloat16", b_layout="column")


def _was_searched(config: Config) -> bool:
    values = dict(config.kwargs) | {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return all(values[name] in allowed for name, allowed in SEARCHED.items())


def _blocks(config: Config) -> list[int]:
    return [config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]]


def score(problem: MatmulProblem, device: Device, winner: list[int | None]) -> Score:
    """Tell the model's pick for one problem, and what it predicts of the winner's blocks.

    `faster`: the share of legal configs that are predicted to be faster than the best with these blocks;
    `longer`: how many times as long as the pick that one is predicted to take. None where none is legal.
    """
    configs = legal_configs(problem, device, FAMILY)
    times = {config: waves.predict_us(config, problem, device) for config in configs}
    pick = waves.likeliest(configs, problem, device)
    near = waves.likeliest(filter(_was_searched, configs), problem, device)
    same = (config for config in FAMILIES[problem.op][FAMILY].configs if _blocks(config) == winner[:3])
    legal = [config for config in same if illegal(config, problem, device) is None]
    best = min((waves.predict_us(config, problem, device) for config in legal), default=None)
    faster = None if best is None else sum(us < best for us in times.values()) / len(times)
    longer = None if best is None else best / times[pick]
    return {
        "pick": [*_blocks(pick), pick.num_warps, pick.num_stages],
        "searched": [*_blocks(near), near.num_warps, near.num_stages],
        "faster": faster if faster is None else round(faster, 4),
        "longer": longer if longer is None else round(longer, 4),
    }


def scored(path: Path = WINNERS) -> list[Score]:
    """Score published winners, in their order."""
    lines = []
    for each in json.loads(path.read_text())["tables"]:
        n, k, device = each["n"], each["k"], DEVICES[each["gpu"]]
        for m, winner in each["winners"].items():
            problem = problem_of(int(m), n, k, each["dtype"])
            named = {"gpu": SHORT[each["gpu"]], "m": int(m), "n": n, "k": k}
            lines.append(named | score(problem, device, winner))
    return lines


def _share(hits: Iterable[bool]) -> str:
    counted = list(hits)
    return f"{sum(counted) / len(counted):.0%}" if counted else ""


def close(one: Blocks, other: Blocks) -> bool:
    """Tell whether each of BLOCK_M and BLOCK_N is at most twice the other's."""
    return all(abs(math.log2(a / b)) <= 1 for a, b in zip(one, other, strict=True))


def _tile(values: list[Any]) -> Blocks:
    return values[0], values[1]


def _at(values: list[float], share: float) -> float:
    """Return the smallest value that at least this share of values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _kept(lines: list[Score], gpu: str, few: bool) -> list[Score]:
    return [line for line in lines if line["gpu"] == gpu and (line["m"] <= FEW) == few]


def agreement(lines: list[Score], published: Winners, few: bool) -> str:
    """Tabulate shares of problems whose blocks are those of the published winner."""
    rows = []
    for gpu, own in published.items():
        kept = _kept(lines, gpu, few)
        if not kept:
            continue
        won = [_tile(own[line["m"], line["n"], line["k"]]) for line in kept]
        picks, near = ([_tile(line[name]) for line in kept] for name in ("pick", "searched"))
        compared = (
            (picks, eq),
            (picks, close),
            (near, eq),
            *(([each] * len(won), eq) for each in FIXED),
        )
        shares = (_share(map(test, mine, won)) for mine, test in compared)
        rows.append((gpu, str(len(kept)), *shares))
    fixed = " | ".join(f"fixed {m}x{n}:" for m, n in FIXED)
    head = "GPU | problems: | pick has the same: | each within 2 times: | same, of the searched space:"
    return table(f"{head} | {fixed}", rows)


def ranks(lines: list[Score], published: Winners, few: bool) -> str:
    """Tabulate what the model says of the winner's blocks."""
    rows = []
    for gpu in published:
        kept = _kept(lines, gpu, few)
        faster, longer = ([x[key] for x in kept if x[key] is not None] for key in ("faster", "longer"))
        if faster:
            missing = _share(line["faster"] is None for line in kept)
            shares = (f"{value:.1%}" for value in (statistics.median(faster), _at(faster, 0.95)))
            times = (f"{value:.2f}" for value in (statistics.median(longer), _at(longer, 0.95)))
            rows.append((gpu, missing, *shares, *times))
    head = "GPU | no legal config: | predicted faster, median: | 95%: | times the pick's time, median: | 95%:"
    return table(head, rows)


def pairs(published: Winners) -> str:
    """Tabulate how far the published tables agree with each other."""
    rows = []
    for one, other in PAIRS:
        first, second = published[one], published[other]
        both = sorted(first.keys() & second.keys())
        cells = [
            _share(test(_tile(first[at]), _tile(second[at])) for at in both if (at[0] <= FEW) == few)
            for test in (eq, close)
            for few in (True, False)
        ]
        rows.append((f"{one}, {other}", str(len(both)), *cells))
    some = (f"up to {FEW} rows:", f"more than {FEW} rows:")
    names = " | ".join(f"{how}, {part}" for how in ("same", "within 2 times") for part in some)
    return table(f"tables | sizes: | {names}", rows)


def page(path: Path = WINNERS, scores: Path = SCORES) -> str:
    """Return the text of docs/other_gpus.md."""
    published, lines = winners(path), json.loads(scores.read_text())
    parts = {"FEW": FEW, "PROBLEMS": len(lines), "FILES": len(json.loads(path.read_text())["tables"])}
    for few, name in ((True, "FEW_ROWS"), (False, "MANY_ROWS")):
        parts[f"AGREEMENT_{name}"] = agreement(lines, published, few)
        parts[f"RANKS_{name}"] = ranks(lines, published, few)
    return TEMPLATE.read_text().rstrip("\n").format(**parts, PAIRS=pairs(published))


def main() -> None:
    """Print the page; with --write, score anew and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="score all anew, write scores and page")
    if parser.parse_args().write:
        rows = ",\n".join(json.dumps(line) for line in scored())
        SCORES.write_text(f"[\n{rows}\n]\n")
        PAGE.write_text(page())
    print(page())


if __name__ == "__main__":
    main()
