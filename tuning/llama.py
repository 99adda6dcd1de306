"""Time a Llama model of about a billion parameters with and without `tritile.use_in_torch`: tokens a second.

    python tuning/llama.py ordinary eager --results tuning/llama/nvidia-h200.json
    python tuning/llama.py odd compiled

Random weights in bfloat16, by a config of transformers: "ordinary" has the sizes of Llama 3.2 1B, "odd" a
vocabulary of 50,257, rows of 1,500 and of 4,001 in between. `how`: "eager"; "compiled", by torch.compile; or
"graphs", with the forward pass of prefill and of decoding captured in a CUDA graph. Both sides take
turns; medians.
Before that the logits and the loss of both are compared with a float32 copy of the model.
Tune first: `tritile tune --suite llama`.
"""

import argparse
import contextlib
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import tritile
from models import seconds
from tritile.core.device import gpu
from tritile.core.settings import wants_crossing
from tritile.in_torch import building
from tritile.lab.report import environment

SIZES = {
    "ordinary": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "odd": {
        "vocab_size": 50257, "hidden_size": 1500, "intermediate_size": 4001, "num_hidden_layers": 40,
        "num_attention_heads": 15, "num_key_value_heads": 5,
    },
}  # fmt: skip
PROMPTS, LENGTH = 2, 2048  # of prefill and training
CONTEXT, NEW = 128, 64  # tokens before decoding, and decoded
ROUNDS, EAGER_DECODES = 7, 9  # eager decoding is bound by the host, and its times vary


def made(name: str) -> torch.nn.Module:
    """Make the model with random weights."""
    config = transformers.LlamaConfig(**SIZES[name], max_position_embeddings=4096, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


SIDES = {"torch": contextlib.nullcontext, "tritile": tritile.use_in_torch}  # contexts that are compared


def measured(
    call_of: Callable[[str], Callable[[], object]], tokens: int, rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the tokens per second of both sides, timed by turns; `call_of` makes the call of a side."""
    calls = {}
    for side, within in SIDES.items():
        with within():
            calls[side] = call_of(side)
            calls[side]()
    times: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(rounds):
        for side, within in SIDES.items():
            with within():
                times[side].append(seconds(calls[side]))
    return {side: tokens / statistics.median(taken) for side, taken in times.items()}


def captured(call: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Capture the call in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def compiled(side: str, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Compile the call; under `use_in_torch` without the copies that pad odd matrices for cuBLAS."""
    return torch.compile(call, options={"shape_padding": side == "torch"})


def with_how(how: str, side: str, call: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Return a call without gradients, run as `how` says."""
    if how == "graphs":
        return captured(call)
    return compiled(side, call) if how == "compiled" else call


def prefill(model: torch.nn.Module, how: str) -> dict[str, float]:
    """Return the tokens of prompts processed a second."""
    ids = torch.randint(model.config.vocab_size, (PROMPTS, LENGTH), device="cuda")

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=False, logits_to_keep=1).logits

    return measured(lambda side: with_how(how, side, forward), ids.numel())


def decode(model: torch.nn.Module, how: str, batch: int) -> dict[str, float]:
    """Return the tokens made a second: by `generate` if eager, else by steps over a cache of fixed size."""
    ids = torch.randint(model.config.vocab_size, (batch, CONTEXT), device="cuda")
    if how == "eager":
        how_many = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0}
        generate = functools.partial(model.generate, ids, attention_mask=torch.ones_like(ids), **how_many)
        return measured(lambda side: generate, batch * NEW, EAGER_DECODES)
    step = one_step(model, ids)
    return measured(lambda side: with_how(how, side, step), batch)


def one_step(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a step that makes one more token for each prompt, always at the same place of a static cache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=CONTEXT + NEW)
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    token = ids[:, -1:].clone()

    def step() -> torch.Tensor:
        with torch.no_grad():
            logits = model(token, past_key_values=cache).logits
            for layer in cache.layers:
                layer.cumulative_length.sub_(1)
        return logits

    return step


def train(model: torch.nn.Module, how: str) -> dict[str, float]:
    """Return the tokens a second of a forward and backward pass, without an optimizer."""
    ids = torch.randint(model.config.vocab_size, (PROMPTS, LENGTH), device="cuda")

    def loss() -> torch.Tensor:
        return model(ids, labels=ids, use_cache=False).loss

    def step(forward: Callable[[], torch.Tensor]) -> None:
        forward().backward()
        model.zero_grad(set_to_none=True)

    def call_of(side: str) -> Callable[[], None]:
        forward = compiled(side, loss) if how == "compiled" else loss
        return lambda: step(forward)

    return measured(call_of, ids.numel())


def errors(model: torch.nn.Module) -> dict[str, dict[str, float]]:
    """Return how far logits, loss and the embedding's gradient are from those of a copy in float32."""
    ids = torch.randint(model.config.vocab_size, (1, 1024), device="cuda")

    def answers(of: torch.nn.Module) -> dict[str, torch.Tensor]:
        got = of(ids, labels=ids, use_cache=False)
        got.loss.backward()
        gradient = of.get_input_embeddings().weight.grad.float()
        of.zero_grad(set_to_none=True)
        return {"logits": got.logits.float(), "loss": got.loss.detach().float(), "gradient": gradient}

    exact = transformers.LlamaForCausalLM(model.config).to("cuda").eval()
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    wanted = answers(exact)
    del exact
    found = {}
    for side, within in SIDES.items():
        with within():
            got = answers(model)
        found[side] = {n: float((got[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted}
    return found


def keep(file: Path, lines: list[dict]) -> None:
    """Write lines to a JSON list, replacing older ones of the same model, way and task."""
    file.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    found = {(line["model"], line["how"], line["task"]): line for line in [*known, *lines]}
    file.write_text("[\n" + ",\n".join(map(json.dumps, found.values())) + "\n]\n", encoding="utf-8")


def main() -> None:
    """Measure one model in one way, and print and keep a line for each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=SIZES)
    parser.add_argument("how", choices=("eager", "compiled", "graphs"))
    parser.add_argument("--tasks", nargs="+", default=["prefill", "decode1", "decode16", "train"])
    parser.add_argument("--results", type=Path, help="the file that lines are kept in")
    wanted = parser.parse_args()
    if wants_crossing():
        building.build()
    model = made(wanted.model)
    parameters = sum(p.numel() for p in model.parameters())
    facts = {"model": wanted.model, "how": wanted.how, "parameters": parameters}
    facts["env"] = environment.environment(gpu(0)) | {"transformers": transformers.__version__}

    def note(line: dict) -> None:
        print(json.dumps(line), flush=True)
        if wanted.results:
            keep(wanted.results, [facts | line])

    if wanted.how == "eager":
        note({"task": "errors"} | errors(model))
    tasks = {
        "prefill": lambda: prefill(model, wanted.how),
        "decode1": lambda: decode(model, wanted.how, 1),
        "decode16": lambda: decode(model, wanted.how, 16),
        "train": lambda: train(model, wanted.how),
    }
    for name in wanted.tasks:
        if name == "train" and wanted.how == "graphs":
            continue  # torch captures whole training steps by other means
        torch._dynamo.reset()
        speeds = tasks[name]()
        note({"task": name, **speeds, "ratio": speeds["tritile"] / speeds["torch"]})


if __name__ == "__main__":
    main()
