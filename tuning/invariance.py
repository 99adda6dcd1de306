"""Measure batch invariance: its products, a model, the bits of rows, and what it costs the host.

    python tuning/invariance.py --fetch .gpu-sources/batch_invariant_ops    # public operators, from GitHub
    python tuning/invariance.py --output tuning/results/GPU [--only products model]
    python tuning/invariance.py --small    # tiny sizes on the CPU: does the script run?

Each part appends lines to `invariance.jsonl`. Times are in microseconds:

- `cost`: the host's time of `torch.mm` before `tritile.batch_invariant(torch=True)` is first entered, inside,
  and after it was left, and at how many shapes the bits after differ from those before. It runs first;
- `products`: tritile's batch-invariant kernels and torch's own choice, with nothing remembered, at products
  drawn by the seed of unseen.py and those of suites llama and llm;
- `public`: the drawn products again, in turns with the batch-invariant product that vLLM copied;
- `model`: a decode step and a prefill of a small Llama with random weights, outside and inside;
- `bits`: calls whose rows differ from those of the whole batch: inside (`differed`), and outside.
"""

import argparse
import importlib
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import tritile
from tritile.core.device import current_gpu
from tritile.errors import brief
from tritile.invariant import context, overrides
from tritile.lab import baselines
from tritile.lab.bench import measured
from tritile.lab.environment import environment
from tritile.tune.calibrate.draw import log_uniform, sized
from tritile.tune.subject import answers
from tritile.tune.subject.torch_calls import tensors_of
from tritile.tune.suites import SHIPPED, Case, find
from tritile.tuner.measure import timing
from unseen import compile_all, nothing_remembered, seed_of

PUBLIC: Final = "https://github.com/thinking-machines-lab/batch_invariant_ops"
COMMIT: Final = "f22b1fbe534b1fe045080f44a970a441caaf3c4f"
# Models, which get 2 prompts and 8 caches of so many tokens.
LARGE: Final = argparse.Namespace(hidden=2048, heads=16, kv_heads=4, wide=5632, layers=8, words=32000,
                               prompt=1024, cache=512)  # fmt: skip
SMALL: Final = argparse.Namespace(hidden=64, heads=4, kv_heads=2, wide=176, layers=2, words=512,
                               prompt=32, cache=16)  # fmt: skip
WHOLE, N, K = 300, 256, 1024  # of part "bits": rows of the whole batch, and sizes
Line = dict[str, Any]
wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
linear, norm = partial(torch.nn.Linear, bias=False), partial(torch.nn.RMSNorm, eps=1e-6)


class Invariant(Case):
    """A case whose call is batch-invariant."""

    @property
    def problem(self) -> Any:
        return replace(super().problem, invariant=True)  # type: ignore[arg-type]


def drawn() -> Iterator[Case]:
    dice = random.Random(f"invariance {seed_of()}")
    for _ in range(40):
        m, n, k = log_uniform(dice, 1, 8192), *(sized(dice, 512, 16384, 64) for _ in "nk")
        yield Case("drawn", "matmul", "bfloat16", "NT", m=m, n=n, k=k)


def times_of(case: Case, theirs: Any) -> Line:
    """Time a product by tritile, torch and `theirs`, a function or None, and check all results."""
    line: Line = {}

    def others(call: Any) -> dict[str, Any]:
        baseline = baselines.Functional(tensors_of, theirs)
        line["public_error"] = answers.check(baselines.into_out(baseline), call)
        return {"public": baseline}

    found = measured(case, others if theirs else None)
    line |= {"tritile_us": found.tritile_us, "torch_us": found.torch_us, "error": found.error}
    line |= {"public_us": found.others_us["public"]} if theirs else {}
    line |= {"spreads": {"tritile": found.spread, **found.spreads}}
    return line | {"config": str(found.config), "plan_source": found.source}


def timed(options: argparse.Namespace, cases: Iterable[Case], theirs: Any = None) -> Iterator[Line]:
    """Time cases with nothing remembered, and tritile's kernels compiled before."""
    until, own = time.monotonic() + options.seconds, [Invariant(**vars(case)) for case in cases]
    with nothing_remembered():
        compile_all(own, options.gpu)
        for number, case in enumerate(own):
            if time.monotonic() > until:
                print(f"--seconds: {len(own) - number} products were left out", file=sys.stderr)
                break
            line = {name: getattr(case, name) for name in ("suite", "dtype", "layout", "m", "n", "k")}
            try:
                line |= times_of(case, theirs)
            except Exception as error:  # costs this product alone
                line["failed"] = brief(error)
            torch.cuda.empty_cache()  # torch does not give one case's graph memory to another
            yield line


def products(options: argparse.Namespace) -> Iterator[Line]:
    cases = [*drawn(), *find(("llama", "llm"), SHIPPED)]
    return timed(options, (case for case in cases if case.suite in options.suites))


def public(options: argparse.Namespace) -> Iterator[Line]:
    sys.path.insert(0, str(options.public.resolve()))
    theirs = importlib.import_module("batch_invariant_ops").matmul_persistent
    return timed(options, drawn(), theirs)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings to x (..., tokens, width), by angles (tokens, width / 2)."""
    left, right = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Layer(torch.nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        hidden, wide, self.width = sizes.hidden, sizes.wide, sizes.hidden // sizes.heads
        of_kv = sizes.kv_heads * self.width
        self.first, self.second = norm(hidden), norm(hidden)
        self.q, self.k, self.v, self.o = (linear(hidden, out) for out in (hidden, of_kv, of_kv, hidden))
        self.gate, self.up, self.down = linear(hidden, wide), linear(hidden, wide), linear(wide, hidden)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, cache: torch.Tensor | None) -> torch.Tensor:
        """Return the residual stream. The last place in `cache` is for the keys and values of x."""
        y, shape = self.first(x), (*x.shape[:2], -1, self.width)
        q, k, v = (each(y).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = rotated(q, angles), rotated(k, angles)
        if cache is not None:  # (2, batch, heads, tokens, width)
            cache[0, :, :, -1:], cache[1, :, :, -1:] = k, v
            k, v = cache
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(torch.nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(sizes.words, sizes.hidden)
        self.layers = torch.nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = norm(sizes.hidden), linear(sizes.hidden, sizes.words)
        width = sizes.hidden // sizes.heads
        self.angles = torch.arange(sizes.prompt)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)

    def forward(self, tokens: torch.Tensor, caches: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of tokens (batch, tokens): of prompts, or of one token behind each cache."""
        x, count = self.embedding(tokens), tokens.shape[1]
        end = count if caches is None else caches.shape[-2]
        for number, layer in enumerate(self.layers):
            x = layer(x, self.angles[end - count : end], None if caches is None else caches[number])
        return self.head(self.norm(x))


class Host(timing.Eager):
    """Times runs by the host's clock, to the end of their work on the GPU."""

    def _all_us(self) -> float:
        return 1e6 * timeit.timeit(lambda: ([*map(self._run, self._calls)], wait()), wait, number=1)


@torch.no_grad()
def model(options: argparse.Namespace) -> Iterator[Line]:
    sizes = SMALL if options.small else LARGE
    with torch.device(options.device):
        net = Llama(sizes).bfloat16()
        prompts, last = (torch.randint(sizes.words, shape) for shape in ((2, sizes.prompt), (8, 1)))
        of_heads = sizes.kv_heads, sizes.cache, sizes.hidden // sizes.heads
        caches = torch.randn(sizes.layers, 2, 8, *of_heads, dtype=torch.bfloat16)
    compiled, graphed = (
        torch.compile(net, fullgraph=True, mode=mode) for mode in ("default", "reduce-overhead")
    )
    runs: dict[str, Callable[[int], torch.Tensor]] = {
        "decode, CUDA graph": lambda _: net(last, caches),
        "prefill": lambda _: net(prompts),
        "prefill, torch.compile": lambda _: compiled(prompts),
        "prefill, torch.compile with CUDA graphs": lambda _: graphed(prompts),
    }
    with context.report() as found:
        _ = net(last, caches), net(prompts)
    others = [each.name for each in found.operations]
    for what, run in [*runs.items()][: 2 if options.no_compile else 4]:
        timer = timing.Graph if what.startswith("decode") and not options.small else Host
        ways = run, tritile.batch_invariant(torch=True)(run)
        theirs, ours = (way(0).float() for way in ways)  # compiles
        samples = timing.interleaved([timer(way, range(4)) for way in ways], budget_ms=2000)
        outside, inside = map(timing.timing_of, samples)
        line = {"what": what, "torch_us": outside.us, "invariant_us": inside.us}
        line |= {"ratio": outside.us / inside.us, "spreads": [outside.spread, inside.spread]}
        line |= {"difference": float((ours - theirs).norm() / theirs.norm()), "not_invariant": others}
        yield line


def calls_of(dtype: torch.dtype, device: str) -> dict[str, Callable[..., torch.Tensor]]:
    """Return calls by name of x (rows, K) and y (rows, N); a result has a row for each of theirs."""
    weights, bias = torch.randn(2, N, K, device=device).to(dtype), torch.randn(N, device=device).to(dtype)
    weight, grad = weights[1], torch.autograd.grad
    return {
        "mm": lambda x, y: torch.mm(x, weight.t()),
        "addmm": lambda x, y: torch.addmm(bias, x, weight.t()),
        "bmm": lambda x, y: torch.bmm(x.expand(2, *x.shape), weights.mT)[1],
        "linear": lambda x, y: F.linear(x, weight, bias),
        "matmul": lambda x, y: torch.matmul(x[None], weight.t())[0],
        "einsum": lambda x, y: torch.einsum("mk,nk->mn", x, weight),
        "gradient": lambda x, y: grad(F.linear(own := x.detach().requires_grad_(), weight, bias), own, y)[0],
    }


def placed(x: torch.Tensor, rows: list[int], place: str) -> torch.Tensor:
    """Return rows of x, consecutive ones for a view. Padding is NaN."""
    if place in ("view", "copied"):
        return x[rows[0] : rows[-1] + 1] if place == "view" else x[rows]
    first = int(place == "odd column")
    return x.new_full((len(rows), K + 8), math.nan)[:, first : first + K].copy_(x[rows])


def bits(options: argparse.Namespace) -> Iterator[Line]:
    calls = {kind: calls_of(kind, options.device) for kind in (torch.bfloat16, torch.float16, torch.float32)}
    x, y = (torch.randn(WHOLE, size, device=options.device) for size in (K, N))
    count = 60 if options.small else 1000

    def differing() -> list[str]:
        """Return the calls whose rows have other bits than those of the whole batch."""
        dice, wholes, found = random.Random(f"bits {seed_of()}"), dict[Any, torch.Tensor](), list[str]()
        for _ in range(count):
            dtype, size = dice.choice([*calls]), dice.choice((1, 2, 7, 64, WHOLE))
            place = dice.choice(("view", "copied", "padded", "odd column"))
            name, start = dice.choice([*calls[dtype]]), dice.randrange(WHOLE - size + 1)
            rows = [*range(start, start + size)] if place == "view" else dice.sample(range(WHOLE), size)
            own, of_y, call = x.to(dtype), y.to(dtype), calls[dtype][name]
            if (dtype, name) not in wholes:
                wholes[dtype, name] = call(own, of_y)
            pair = call(placed(own, rows, place), of_y[rows]), wholes[dtype, name][rows]
            if not torch.equal(*(each.contiguous().view(torch.uint8) for each in pair)):
                found.append(f"{name}, {dtype}, {size} rows, {place}")
        return found

    outside, start = differing(), time.monotonic()
    inside = tritile.batch_invariant(torch=True)(differing)()
    line = {"compared": count, "differed": len(inside), "torch_differed": len(outside)}
    yield line | {"which": inside[:20], "seconds": time.monotonic() - start}


def host_us(call: Callable[[], object], batches: int) -> float:
    """Return the microseconds that a call keeps the host busy: the median of batches, on an idle GPU."""
    return 1e6 / 20 * statistics.median(timeit.repeat(call, wait, repeat=batches, number=20))


def cost(options: argparse.Namespace) -> Iterator[Line]:
    assert not overrides.installed(), "batch_invariant(torch=True) was entered before"
    make = partial(torch.randn, device=options.device, dtype=torch.bfloat16)
    sides = (64, 64), (512, 4096), (4096, 512), (777, 1001)
    pairs = [(make(m, k), make(k, n)) for m in (1, 7, 64, 300, 1000) for k, n in sides]
    call, batches = partial(torch.mm, make(64, 64), make(64, 64)), 5 if options.small else 250
    before, us = [torch.mm(a, b) for a, b in pairs], {"before_us": host_us(call, batches)}
    with tritile.batch_invariant(torch=True):
        us["inside_us"] = host_us(call, batches)
    us["after_us"] = host_us(call, batches)
    same = [torch.equal(torch.mm(a, b), old) for (a, b), old in zip(pairs, before, strict=True)]
    yield us | {"shapes": len(pairs), "bits_differ": same.count(False)}


def fetch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for command in ("init", f"fetch --depth=1 {PUBLIC} {COMMIT}", "checkout FETCH_HEAD"):
        verb, *rest = command.split()
        subprocess.run(["git", "-C", str(folder), verb, "--quiet", *rest], check=True)
    shutil.rmtree(folder / ".git")


PARTS: Final = {"cost": cost, "products": products, "public": public, "bits": bits, "model": model}


def main() -> int:
    """Run the requested parts. The exit status is 1 if a product failed, or bits differed on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add, suites = parser.add_argument, ("drawn", "llama", "llm")
    add("--only", nargs="+", choices=PARTS, default=[*PARTS], help="parts (all)")
    add("--suites", nargs="+", choices=suites, default=suites, help="of part products (all)")
    add("--seconds", type=float, default=math.inf, help="of parts products and public (no limit)")
    add("--public", type=Path, default=".gpu-sources/batch_invariant_ops", help="the public operators")
    add("--fetch", type=Path, help="take these from GitHub into a folder, and end")
    add("--no-compile", action="store_true", help="leave torch.compile out of part model")
    add("--small", action="store_true", help="cost, model and bits with tiny sizes on the CPU")
    add("--output", type=Path, help="append to invariance.jsonl in a folder; required without --small")
    options, bad = parser.parse_args(), False
    if options.fetch:
        fetch(options.fetch)
        return 0
    options.gpu, options.device = current_gpu(), "cpu" if options.small else "cuda"
    if not (options.small or (options.gpu and options.output)):
        parser.error("a GPU and --output are required, except with --small")
    parts = {*options.only} - ({"products", "public"} if options.small else set())
    if "public" in parts and not options.public.is_dir():
        parser.error(f"there is no folder {options.public}: --fetch {options.public} makes it")
    for name in (name for name in PARTS if name in parts):
        torch.manual_seed(0)
        for line in PARTS[name](options):
            bad |= any(line.get(what) for what in ("failed", "differed", "bits_differ"))
            env = environment(options.gpu) | {"seed": seed_of()}
            row = {"op": "invariance", "part": name, **line, "env": env}
            short = json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.6g}"))
            print(text := json.dumps(short), flush=True)
            if options.output:
                options.output.mkdir(parents=True, exist_ok=True)
                with (options.output / "invariance.jsonl").open("a") as file:
                    file.write(text + "\n")
    return int(bad and not options.small)


if __name__ == "__main__":
    sys.exit(main())
