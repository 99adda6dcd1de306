"""tritile tune --model: measure a step of a model."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from tritile.cli import shared
from tritile.cli.shared import console, gpu_here, print_json, working
from tritile.core.settings import mode
from tritile.nn import convert
from tritile.nn.exchanged import assign, is_linear

ROUNDS = 9  # of both sides, after the run that measures


def _seconds(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def tune_model(name: str, as_json: bool = False) -> None:
    """Measure the linear layers that a step calls, and time the step with the faster ones converted."""
    gpu_here()
    step = shared.function_named("--model", name)
    called: dict[torch.nn.Module, None] = {}
    with working("measuring"):
        handle = register_module_forward_pre_hook(lambda layer, args: called.setdefault(layer))
        try:
            step()  # the first call, which also loads what the model needs
        finally:
            handle.remove()
        layers = torch.nn.ModuleList(layer for layer in called if is_linear(layer))
        with mode("tune"):
            conversion = convert(layers, forward=step)
        exchanged = [layers.get_submodule(each) for each in conversion.exchanged]
        times: dict[bool, list[float]] = {False: [], True: []}
        step()  # compiles what the converted layers launch
        for number in range(ROUNDS):
            for side in (number % 2 == 0, number % 2 == 1):
                for layer in exchanged:
                    assign(layer, side)
                times[side].append(_seconds(step))
    alone, taken = (1e3 * statistics.median(times[side]) for side in (False, True))
    if as_json:
        return print_json({"model": name, "torch_ms": alone, "tritile_ms": taken})
    console.print(conversion)
    console.print(f"{name}: {alone:.2f} ms, with tritile {taken:.2f} ms: {alone / taken:.3f} times as fast")
