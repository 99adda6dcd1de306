"""Write the times of torch that `tritile.use_in_torch` decides by, from lines of results.

    python tuning/export_peers.py nvidia-h200

reads tuning/results/<gpu>/*.jsonl, and alignments.json there (`tuning/alignments.py`), and writes
tritile/tables/<gpu>.peers.json. Taken are products of 16-bit types and of fp32 in TF32, bare or with a bias:
what is beside torch's own call of the same product. Of a problem that was measured twice, the later line
counts.
"""

import argparse
import json
from pathlib import Path

from tritile.core.problem import MatmulProblem, Problem, epilogue_of, problem_from_dict
from tritile.in_torch.peers import Peer, to_text
from tritile.lab.report.results import case_of, read

ROOT = Path(__file__).parents[1]


def wanted(problem: MatmulProblem) -> bool:
    """Whether torch's mm, bmm, addmm or baddbmm makes this product, and the switch may take it."""
    fused = epilogue_of(problem.epilogue)
    rest = (fused.scale_a, fused.scale_b, fused.residual, fused.activation, fused.gated)
    half = problem.dtype in ("float16", "bfloat16") and problem.out_dtype == problem.dtype
    return not any(rest) and (half or (problem.dtype == "float32" and problem.precision == "tf32"))


def lines_of(slug: str) -> list[dict]:
    """All lines of results of one GPU model."""
    folder = ROOT / "tuning" / "results" / slug
    files = [
        file for file in sorted(folder.glob("*.jsonl")) if file.stem != "unseen"
    ]  # drawn: to be met anew
    lines = [line for file in files for line in read(file)]
    mixed = folder / "alignments.json"
    return lines + (json.loads(mixed.read_text(encoding="utf-8")) if mixed.exists() else [])


def problem_of(line: dict) -> Problem | None:
    """The problem that a line is of: as the line has it, or of its case; None where it is of no product."""
    if "problem" in line:
        return problem_from_dict(line["problem"])
    return case_of(line).problem if line["op"] == "matmul" else None


def peers_of(lines: list[dict]) -> list[Peer]:
    """The peers in lines of results, of which later ones count."""
    found = {}
    for line in sorted(lines, key=lambda line: line["env"]["time"]):
        problem = problem_of(line)
        if isinstance(problem, MatmulProblem) and wanted(problem):
            found[problem] = Peer(problem, line["tritile_us"], line["torch_us"], line["plan_source"])
    return list(found.values())


def main() -> None:
    """Read the lines of one GPU model and write its file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("slug", help="the GPU model as file names have it: nvidia-h200")
    slug = parser.parse_args().slug
    lines = lines_of(slug)
    names = {line["env"]["gpu"] for line in lines}
    if len(names) != 1:
        raise SystemExit(f"lines of {len(names)} GPU models in {slug}: wanted those of one")
    peers = peers_of(lines)
    target = ROOT / "tritile" / "tables" / f"{slug}.peers.json"
    target.write_text(to_text(names.pop(), peers))
    print(f"{len(peers)} products in {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
