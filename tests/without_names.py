"""Use tritile where torch or Triton lacks one of the names that its adapters bind, each in turn.

Prints a line for each name, or each nth, n being its argument: the path, and what importing tritile,
`matmul` and a kernel under `tritile.autotune` gave. torch and Triton are imported once. Each name is deleted
in a fork, and put back once the adapters have looked for it, as torch needs its own names. To be run with
TRITON_INTERPRET=1.
"""

import os
import re
import sys
import types
import warnings
from importlib import import_module
from pathlib import Path

import torch
import torch._functorch.pyfunctorch
import torch._functorch.vmap
import torch._subclasses.fake_tensor
import triton
import triton.language as tl
import triton.runtime.interpreter

PACKAGE = Path(__file__).parents[1] / "tritile"
ADAPTERS = ("torch_private", "triton_private", "interpreter_private")


def names():
    texts = [(PACKAGE / "core" / f"{name}.py").read_text() for name in ADAPTERS]
    return sorted({name for text in texts for name in re.findall(r'bound\(\s*"([\w.]+)"', text)})


@triton.jit
def doubled(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


def by_matmul(tritile):
    a = torch.arange(35.0).reshape(5, 7)
    return torch.equal(tritile.matmul(a, a.t(), precision="ieee"), a @ a.t())


def by_decorated(tritile):
    x, out = torch.arange(40.0), torch.zeros(40)
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32)]
    kernel = tritile.autotune(configs=configs, key=["n"])(doubled)
    kernel[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](x, out, 40)
    return torch.equal(out, 2 * x)


def tried(what, *args):
    try:
        return what(*args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " ")


def report(*fields):
    """A line in one write, as two children share the pipe and `print` may write each field by itself."""
    os.write(1, ("\t".join(map(str, fields)) + "\n").encode())


def without(path):
    # A stand-in for the package, so that adapters are imported before whatever else needs the name.
    sys.modules["tritile"] = stand_in = types.ModuleType("tritile")
    stand_in.__path__ = [str(PACKAGE)]
    found = import_module("tritile.core.bound").found
    above, _, name = path.rpartition(".")
    owner = sys.modules.get(above) or found(above)
    held = getattr(owner, name, None)  # None of what only builds for CUDA have
    try:
        if held is not None:
            delattr(owner, name)
        found(path)
    except AttributeError:
        pass
    else:
        return report(path, "stays")
    if hasattr(owner, name):
        return report(path, "stays")
    imported = [tried(import_module, f"tritile.core.{adapter}") for adapter in ADAPTERS]
    if held is not None:
        setattr(owner, name, held)
    del sys.modules["tritile"]
    tritile = tried(import_module, "tritile")
    failed = next((each for each in (*imported, tritile) if isinstance(each, str)), "")
    made = [failed or tried(call, tritile) for call in (by_matmul, by_decorated)]
    report(path, failed or True, *made)


def main():
    warnings.simplefilter("ignore")
    running = 0
    for path in names()[:: int(sys.argv[1])]:
        if running == 2:
            os.wait()
            running -= 1
        if os.fork():
            running += 1
            continue
        without(path)
        os._exit(0)
    while running:
        os.wait()
        running -= 1


if __name__ == "__main__":
    main()
