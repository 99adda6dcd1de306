"""GPUs that are not here, by the facts that plans depend on: every plan is legal, and kernels compile."""

import contextlib
import random
import re

import pytest

import tritile
from tests import picks
from tests.ahead import SQUARE, later, pairs
from tritile.choose import pick
from tritile.core.device import SHORT, target_device, target_key
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem, QuantizedProblem
from tritile.families.launching import compiled_for
from tritile.families.space import illegal
from tritile.runtime.ahead import check_fits

NEW = ("5090", "pro-6000", "gb10", "b300", "h20", "h800", "h200-nvl", "gh200", "l4", "a10", "mi325x", "mi350")
ARCHITECTURES = ("5090", "gb10", "b300", "h20", "l4", "a10", "mi325x", "mi350")  # each one once
SAMPLES = {
    "16-bit": SQUARE,
    "ragged": MatmulProblem(1, 1000, 1023, 511, "bfloat16", "bfloat16", a_align=2, b_align=2, out_align=2),
    "fp32": MatmulProblem(1, 512, 512, 512, "float32", "float32"),
    "int8": MatmulProblem(1, 512, 512, 512, "int8", "int32", b_layout="column"),
    "int4 weight": QuantizedProblem(64, 4096, 4096, "bfloat16", 4, 128),
    "transpose": PermuteProblem.transposed(1, 4096, 4096, 2),
}


def resized(call, draw):
    """A call of tests/picks.toml with other sizes above 9; those that are alike stay so."""
    sizes = {}

    def size(found):
        other = draw.choice((16 * draw.randint(1, 512), round(2 ** draw.uniform(0, 13))))
        return sizes.setdefault(found[0], str(other))

    return re.sub(r"\b\d\d+", size, call)


@pytest.mark.parametrize("count", [8, later(200)])
@pytest.mark.parametrize("name", NEW)
def test_every_plan_is_legal(name, count):
    """Of calls of all operations and dtypes with drawn sizes, with and without torch's kernel."""
    device, legal, draw = target_device(name), 0, random.Random(name)
    for call in draw.choices([*picks.calls().values()], k=count):
        call = resized(call, draw)
        for backends in ("triton", "triton,aten"):
            plan = None
            with (
                contextlib.suppress(tritile.errors.UnsupportedError),  # on some GPUs, or on all
                tritile.mode("cached", backends=backends),
            ):
                plan = picks.plan(call, device)
            if plan is None:
                continue
            by_torch = plan.config.family == "aten"
            assert by_torch or illegal(plan.config, plan.problem, device) is None, (call, plan)
            legal += 1
    assert legal > 1.5 * count  # of twice as many: few are refused


@pytest.mark.parametrize(("name", "sample"), pairs(ARCHITECTURES, [*SAMPLES]))
def test_a_sample_compiles(name, sample):
    device, problem = target_device(name), SAMPLES[sample]
    plan = pick.plan_for(problem, device, "cached")
    kernel = compiled_for(problem, plan.config, device)
    check_fits(kernel, device)
    assert kernel.asm["cubin" if device.nvidia else "hsaco"]


def test_descriptor_needs_wgmma():
    """Tensor cores that read shared memory."""
    by = {name: target_device(name).has_tma for name in NEW}
    assert [name for name in NEW if by[name]] == ["b300", "h20", "h800", "h200-nvl", "gh200"]
    for name in ("5090", "gb10"):
        plan = pick.plan_for(SQUARE, target_device(name), "off")
        assert plan.config.family not in ("descriptor", "warpgroups")


@pytest.mark.parametrize("given", ["rtx 5090", "NVIDIA GeForce RTX 5090", "geforce-rtx-5090", "sm_120"])
def test_names_that_people_write(given):
    assert target_key(given) == "sm_120"
    assert target_key("RTX PRO 6000") == target_key("rtx-pro-6000") == SHORT["pro-6000"]
    assert target_key("H200 NVL") == "nvidia-h200-nvl"
    assert target_key("amd instinct mi325x") == SHORT["mi325x"]
