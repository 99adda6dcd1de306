"""Make the section of docs/benchmarks.md about the kinds of problem that torch handles faster."""

from collections.abc import Iterator
from pathlib import Path

import benchmark_drawn as drawn
import benchmark_tuned as tuned
from benchmark_tables import Cells
from tritile.lab.report.results import stored
from tritile.lab.report.summary import geomean, of_cases, sizes_label

HEAD = "GPU | suite | dtype | layout | problems: | geometric mean: | under 1: | worst: | at | instead"
TUNE = "Tune the sizes that you use (`tritile tune`), or call torch."
FP32 = 'Call torch, or take `precision="fp16x3"`, whose error is near fp32\'s.'
WIDE = "Unpack the weight once (`QuantizedWeight.dequantize`) and call torch, if memory allows."
# What a suite's name and a dtype begin with, then what to use; the first that fits counts.
ADVICE = (
    ("drawn, aligned", "", TUNE),
    ("invariance, untuned", "", TUNE),
    ("one weight", "", TUNE),
    ("model", "", "Leave `use_in_torch` off, or tune what the model calls (`tritile tune --model`)."),
    ("complex", "complex128", "Call torch."),
    ("complex", "", 'Call torch, or take `precision="fp16x3"` for hundreds of rows and more.'),
    ("fp64", "float64", "Call torch."),
    ("ragged", "float32", FP32),
    ("square", "float32", FP32),
    ("grouped", "float8", "Call `torch._scaled_grouped_mm`."),
    ("grouped", "", "Call `torch._grouped_mm`."),
    ("scaled", "", "Call `torch._scaled_mm`."),
    ("weights, 256", "", WIDE),
)
OTHERWISE = "Call torch, or tune the sizes that you use."


def advice(kind: tuned.Kind) -> str:
    """Return what to use for a kind, in a sentence."""
    suite, dtype, _ = kind
    fits = (text for of, by, text in ADVICE if suite.startswith(of) and dtype.startswith(by))
    return next(fits, OTHERWISE)


def _cases(folder: Path) -> Iterator[tuned.Case]:
    """Yield the cases of one GPU: its lines, then those of one weight and of models."""
    for line in of_cases(stored([folder], print)):
        yield tuned.any_kind(line), line["ratio_torch"], sizes_label(line)
    for line in drawn.latest_rows(drawn.read(folder, "rows")):
        kind = "one weight, any rows", "bfloat16", "NT"
        for m, ratio in zip(line["rows"], line["ratio_torch"], strict=True):
            yield kind, ratio, f"{m}x{line['size']}x{line['size']}"
    for line in drawn.latest_models(drawn.read(folder, "models")):
        yield (f"models, {line['process']} process", line["mode"], line["what"]), line["ratio"], line["model"]
    if folder == tuned.RESULTS:
        yield from tuned.by_table()


def rows(results: Path) -> Iterator[Cells]:
    """Return a row for each kind whose geometric mean is under 1, from the folders of all GPUs."""
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        for kind, found in sorted(tuned.by_kind(_cases(folder)).items()):
            mean = geomean(ratio for ratio, _ in found)
            if mean < 1:
                count, _, *rest = tuned.figures_of(found)
                yield folder.name, *kind, count, f"{mean:.3f}", *rest, advice(kind)
