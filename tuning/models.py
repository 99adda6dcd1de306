"""Measure nine models of transformers before and after `tritile.nn.convert`, which nothing is tuned to.

    python tuning/models.py --output tuning/results/GPU     # eager: forward passes and training steps
    python tuning/models.py --tune --output tuning/results/GPU  # layers are measured, not predicted
    python tuning/models.py --compiled --models gpt2 bert    # by torch.compile, which takes much longer
    python tuning/models.py --small --turns 3                # tiny models on the CPU: does the script run?

Weights are random and in bfloat16: models are made from configs, and nothing is downloaded. A training step
is a forward pass with its loss, the backward pass, and gradients set to None: an optimizer would be the same
on both sides. One run of it is recorded and converts a copy of the model (`convert(model, forward=...)`).

Each model runs in two processes. The *first* finds no compiled kernel, as on a new machine; a *later* one
finds those of the first.

Both sides take turns in one process. A time is the host's, around as many iterations as take 0.1 s. `ratio`
is that of the medians, torch's by tritile's: above 1 the converted model is faster. `low` and `high` are its
95% interval, by a percentile bootstrap: pairs of a turn are drawn with replacement, 2000 times, from a fixed
seed. `exchanged` counts the layers of `layers` that were exchanged, and `won` has their rows of the table
that `convert` returns. `convert_s` is its time. `first_torch_s` and `first_tritile_s` are the very first
iterations, with all that is loaded, planned and compiled for them; torch's comes first, and starts cuBLAS.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tritile
from tritile.lab.environment import environment

SECONDS = 0.1  # that a time is taken over
DRAWS = 2000
PROCESSES = ("first", "later")
SIDES = ("torch", "tritile")


class Model(NamedTuple):
    """Hold a model's classes in transformers, what its config says, and what one iteration is given."""

    config: str
    task: str  # the end of the name of an AutoModel
    batch: int
    tokens: dict[str, int]  # of each sequence
    sizes: dict[str, Any]
    small: dict[str, Any]  # sizes of --small


def layers(hidden: int, wide: int, count: int, heads: int, **more: Any) -> dict[str, Any]:
    """Name the sizes of a transformer as most configs do."""
    named = {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": count}
    return {**named, "num_attention_heads": heads, **more}


TINY, TINY_IMAGES = layers(64, 136, 2, 4), layers(64, 136, 2, 4, image_size=32, patch_size=8)
QWEN2 = layers(896, 4864, 24, 14, num_key_value_heads=2, tie_word_embeddings=True)
LLAMA = layers(2048, 8192, 16, 32, num_key_value_heads=8, tie_word_embeddings=True, vocab_size=128256)
# Gemma 2B, with a token more than its 256,000, as models have to which one was added.
GEMMA = layers(2048, 16384, 18, 8, num_key_value_heads=1, head_dim=256, vocab_size=256001)
WHISPER = {f"{half}_{name}": size for half in ("encoder", "decoder")
           for name, size in (("layers", 6), ("attention_heads", 8), ("ffn_dim", 2048))}  # fmt: skip
CLIP_TEXT, CLIP_IMAGES = layers(768, 3072, 12, 12), layers(1024, 4096, 24, 16, patch_size=14)
MODELS = {
    "gpt2": Model("GPT2Config", "ForCausalLM", 8, {"input_ids": 1000}, {}, {"n_embd": 48, "n_layer": 2}),
    "bert": Model("BertConfig", "ForMaskedLM", 16, {"input_ids": 385}, {}, TINY),
    "t5": Model("T5Config", "ForSeq2SeqLM", 16, {"input_ids": 257, "decoder_input_ids": 129}, {},
                {"d_model": 64, "d_kv": 8, "d_ff": 136, "num_layers": 2}),
    "whisper": Model("WhisperConfig", "ForSpeechSeq2Seq", 8, {"decoder_input_ids": 101},
                     {"d_model": 512, **WHISPER},
                     {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 50}),
    "vit": Model("ViTConfig", "ForImageClassification", 64, {}, {"num_labels": 1000}, TINY_IMAGES),
    "qwen2": Model("Qwen2Config", "ForCausalLM", 2, {"input_ids": 1021}, QWEN2, TINY),
    "llama": Model("LlamaConfig", "ForCausalLM", 2, {"input_ids": 2048}, LLAMA,
                   TINY | {"num_key_value_heads": 2}),
    "gemma": Model("GemmaConfig", "ForCausalLM", 2, {"input_ids": 1000}, GEMMA,
                   TINY | {"num_key_value_heads": 1, "head_dim": 16}),
    "clip": Model("CLIPConfig", "", 32, {"input_ids": 77},
                  {"text_config": CLIP_TEXT, "vision_config": CLIP_IMAGES, "projection_dim": 768},
                  {"text_config": TINY, "vision_config": TINY_IMAGES, "projection_dim": 64}),
}  # fmt: skip


def transformers() -> Any:
    """Import transformers, which tritile itself does not need."""
    try:
        import transformers
    except ImportError as error:
        raise SystemExit(f"models.py needs transformers: pip install transformers ({error})") from error
    return transformers


def built(name: str, small: bool, device: str) -> torch.nn.Module:
    """Make a model with random weights."""
    model, library = MODELS[name], transformers()
    config = getattr(library, model.config)(**model.sizes | (model.small if small else {}))
    if hasattr(config, "use_cache"):
        config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        made = getattr(library, f"AutoModel{model.task}")
        return made.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)


def drawn(name: str, net: torch.nn.Module, small: bool, device: str) -> tuple[dict, dict]:
    """Draw what a forward pass is given, and what a loss needs beside that."""
    config = net.config.to_dict()
    sizes = config | config.get("text_config", {}) | config.get("vision_config", {})
    batch = 2 if small else MODELS[name].batch
    lengths = {ids: n // 16 if small else n for ids, n in MODELS[name].tokens.items()}

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, device=device, dtype=torch.bfloat16)

    given = {ids: torch.randint(sizes["vocab_size"], (batch, n), device=device) for ids, n in lengths.items()}
    labels = given.get("decoder_input_ids", given.get("input_ids"))
    if "image_size" in sizes:
        given["pixel_values"] = numbers(3, sizes["image_size"], sizes["image_size"])
    if "num_mel_bins" in sizes:
        given["input_features"] = numbers(sizes["num_mel_bins"], 2 * sizes["max_source_positions"])
    if labels is None:
        labels = torch.randint(net.config.num_labels, (batch,), device=device)
    return given, {"return_loss": True} if name == "clip" else {"labels": labels}


def iterate(what: str, net: torch.nn.Module, given: dict, beside: dict) -> None:
    """Make a forward pass or a training step."""
    if what == "train":
        net(**given, **beside).loss.backward()
        net.zero_grad(set_to_none=True)
    else:
        with torch.inference_mode():
            net(**given)


def seconds(call: Callable[[], None], count: int = 1) -> float:
    """Time one iteration of `count`, the GPU's work included."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - start) / count


def measured(calls: dict[str, Callable[[], None]], turns: int) -> dict[str, Any]:
    """Time the call of each side in turns, each of which begins with an iteration that does not count."""
    count = max(1, round(SECONDS / min(seconds(calls["torch"]) for _ in range(3))))
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(turns):
        for side in sorted(SIDES, reverse=turn % 2 == 1):
            calls[side]()
            times[side].append(1e3 * seconds(calls[side], count))
    return compared(times["torch"], times["tritile"]) | {"turns": turns, "iterations": count}


def compared(torch_ms: list[float], tritile_ms: list[float]) -> dict[str, float]:
    """Compare the times of pairs: the medians, their ratio, and the ends of its 95% interval."""
    dice, pairs = random.Random(0), list(zip(torch_ms, tritile_ms, strict=True))

    def ratio(of: list[tuple[float, float]]) -> float:
        return statistics.median(pair[0] for pair in of) / statistics.median(pair[1] for pair in of)

    ratios = [ratio(dice.choices(pairs, k=len(pairs))) for _ in range(DRAWS)]
    low, *_, high = statistics.quantiles(ratios, n=40)
    medians = {"torch_ms": statistics.median(torch_ms), "tritile_ms": statistics.median(tritile_ms)}
    return medians | {"ratio": ratio(pairs), "low": low, "high": high}


def converted(net: torch.nn.Module, step: Callable[[torch.nn.Module], None], asked: Any) -> dict[str, Any]:
    """Convert a model by one run of a step, and say what was exchanged, and in how many seconds."""
    within = tritile.mode("tune") if asked.tune else contextlib.nullcontext()
    begun = time.perf_counter()
    with within:
        device = "nvidia-h200" if asked.small else None
        made = tritile.nn.convert(net, forward=lambda: step(net), device=device)
    took = time.perf_counter() - begun
    won = [dataclasses.asdict(row) for row in made.rows if row.by == "tritile"]
    return {"exchanged": len(made.exchanged), "layers": made.layers, "convert_s": took, "won": won}


def one(name: str, asked: argparse.Namespace) -> None:
    """Measure one model in this process, and print a line of JSON for each of `what`."""
    device = "cpu" if asked.small else "cuda"
    net = built(name, asked.small, device)
    given, beside = drawn(name, net, asked.small, device)
    facts = {
        "mode": "compiled" if asked.compiled else "eager",
        "decided": "measured" if asked.tune else "predicted",
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "env": environment() | {"transformers": transformers().__version__},
    }
    for what in asked.what:
        net.train(what == "train")
        torch.compiler.reset()
        step, calls, first = functools.partial(iterate, what, given=given, beside=beside), {}, {}
        told: dict[str, Any] = {}
        for side, own in zip(SIDES, (net, copy.deepcopy(net)), strict=True):
            if side == "tritile":
                told = converted(own, step, asked)
            calls[side] = functools.partial(step, torch.compile(own) if asked.compiled else own)
            first[f"first_{side}_s"] = seconds(calls[side])
        line = {"what": what} | facts | told | measured(calls, asked.turns) | first
        print(json.dumps(line), flush=True)


def lines_of(name: str, process: str, asked: argparse.Namespace, folder: str) -> tuple[list[dict], bool]:
    """Measure one model in a process of its own: its lines, and whether it came to its end."""
    command = [sys.executable, __file__, "--one", name, "--turns", str(asked.turns), "--what", *asked.what]
    command += [f"--{option}" for option in ("compiled", "small", "tune") if getattr(asked, option)]
    caches = {f"{kind}_CACHE_DIR": f"{folder}/{name}/{kind}" for kind in ("TRITON", "TORCHINDUCTOR")}
    caches["TRITILE_CACHE_DIR"] = f"{folder}/TRITILE"
    environ = {**os.environ, **caches, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ, check=False)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return [{"op": "models", "model": name, "process": process} | line for line in found], not run.returncode


def measure(asked: argparse.Namespace) -> int:
    """Measure each model in two processes: how many of these failed."""
    failed = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in asked.models:
            for process in asked.processes:
                found, ended = lines_of(name, process, asked, folder)
                failed += not ended
                print(*map(json.dumps, found), sep="\n", flush=True)
                if found and asked.output:
                    asked.output.mkdir(parents=True, exist_ok=True)
                    with (asked.output / "models.jsonl").open("a", encoding="utf-8") as file:
                        file.write("".join(json.dumps(line) + "\n" for line in found))
    print(f"{failed} processes failed")
    return failed


def main() -> None:
    """Measure what is asked for; the exit status is 1 where a process failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--what", nargs="+", choices=("forward", "train"), default=["forward", "train"])
    parser.add_argument("--processes", nargs="+", choices=PROCESSES, default=PROCESSES)
    parser.add_argument("--compiled", action="store_true", help="by torch.compile, and not eager")
    parser.add_argument("--tune", action="store_true", help="measure layers (mode tune), do not predict")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--output", type=Path, help="the folder of models.jsonl")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    transformers()
    if not (asked.small or torch.cuda.is_available()):
        raise SystemExit("there is no GPU here to measure: --small runs on the CPU")
    if asked.one:
        one(asked.one, asked)
    else:
        sys.exit(measure(asked) > 0)


if __name__ == "__main__":
    main()
