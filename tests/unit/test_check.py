"""`tritile.check`: a config that lacks a mask is found, and what is right is told to be right."""

import contextlib
import json
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.commands import refused, run
from tritile.core.device import HOST, target_device
from tritile.errors import InvalidValueError, IsolationWarning, TuningError
from tritile.lab import check as checking
from tritile.tuner import decorated as decorating
from tritile.tuner.autotuner import Autotuner

pytestmark = pytest.mark.interpreted


def config(block, **flags):
    return triton.Config({"BLOCK": block, "LOADS": True, "STORES": True, "STOPS": False} | flags)


GOOD = [config(16), config(32)]
UNMASKED = config(16, STORES=False)
FAR = config(1 << 16, STORES=False)  # its stores end 256 KiB past out


def right(x, n):
    return {"out": 2 * x.sum().reshape(1) + torch.arange(n)}


@triton.jit
def summed(x, out, n, BLOCK: tl.constexpr, LOADS: tl.constexpr, STORES: tl.constexpr, STOPS: tl.constexpr):
    """Adds twice the sum of x to each element's number; a flag that is off leaves a mask out."""
    total = 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + at, mask=(at < n) | (not LOADS), other=0.0), 0)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, 2 * total + at, mask=((at < n) | (not STORES)) & (at >= STOPS))


def decorated(configs=GOOD, **words):
    return tritile.autotune(configs, **{"key": ["n"], "reference": right} | words)(summed)


@pytest.fixture
def guards_alone(monkeypatch):
    """Accesses are not seen, as on a GPU."""
    monkeypatch.setattr(decorating, "_shows_accesses", lambda call: False)


def arguments(n):
    return torch.arange(n, dtype=torch.float32), torch.empty(n), n


@pytest.mark.parametrize("restored", [["out"], None], ids=["restored", "poisoned"])
def test_writing_reference_proves_nothing(restored):
    """What it wrote is not what the kernel wrote."""

    def in_place(x, out, n):
        out.copy_(right(x, n)["out"])
        return {"out": out}

    def check(kernel):
        return tritile.check(kernel, *arguments(64), grid=lambda meta: (1,))

    assert check(decorated(reference=in_place, restore_value=restored))
    lazy = config(16, STOPS=1 << 20)  # it stores nothing
    assert not check(decorated([lazy], reference=in_place, restore_value=restored))


def test_right_configs_with_their_calls():
    x, out, n = arguments(64)
    out.fill_(7.0)
    found = tritile.check(decorated(), x, out, n, grid=lambda meta: (1,))
    assert found
    assert bool((out == 7.0).all())  # arguments are left as they are
    assert [each.config for each in found.right] == GOOD
    assert found.wrong == found.failed == ()
    assert not replace(found, configs=())  # nothing was checked
    assert found.calls == ("summed n=64",)
    assert all(each.error == 0.0 for each in found.right)
    assert "2 right, 0 wrong, 0 failed; out compared at summed n=64" in repr(found)
    assert "<caption>summed on host" in found._repr_html_()


@pytest.mark.parametrize(
    ("fault", "reason", "at"),
    [
        (UNMASKED, "wrote outside the memory", 63),
        (FAR, "wrote outside the memory", 64),
        (config(16, LOADS=False), "out[0] is nan", 63),
        (config(16, STOPS=True), "out[0] is never written", 64),
    ],
    ids=["a store's mask", "a store's mask, far past the end", "a load's mask", "an element left out"],
)
@pytest.mark.parametrize("is_seen", [True, False])
def test_fault_found_at_its_sizes(fault, reason, at, is_seen, request):
    """Where every tile is whole a missing mask does no harm."""
    if not is_seen:
        request.getfixturevalue("guards_alone")
    elif not fault.kwargs["LOADS"]:
        reason = "read outside the memory of its arguments: just past the end of x"
    kernel = decorated([*GOOD, fault])
    assert bool(tritile.check(kernel, *arguments(64), grid=(1,))) is (at == 63)
    found = tritile.check(kernel, 64, make=arguments, grid=(1,))
    assert not found
    assert [each.config for each in found.right] == GOOD
    (wrong,) = found.wrong
    assert wrong.config == fault
    assert reason in wrong.reason
    assert wrong.reason in repr(found)
    assert wrong.reason.startswith(f"at summed n={at} of make({at}): ")


@triton.jit
def raised(x, n, BLOCK: tl.constexpr, MASKS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    masked = (at < n) | (not MASKS)
    tl.store(x + at, tl.load(x + at, mask=masked) + 1, mask=masked)


def raised_by(masks, **told):
    configs = [triton.Config({"BLOCK": 16, "MASKS": each}) for each in masks]
    return tritile.autotune(configs, ["n"], reference=lambda x, n: {"x": x + 1}, **told)(raised)


@pytest.mark.parametrize("told", ["restore_value", "reset_to_zero"])
def test_in_place_without_masks_is_found(told, guards_alone):
    """Although NaN + 1 is NaN."""
    found = tritile.check(raised_by((True, False), **{told: ["x"]}), torch.zeros(40), 40, grid=(3,))
    assert [each.outcome for each in found.configs] == ["right", "wrong"]
    assert "wrote outside" in found.wrong[0].reason


@triton.jit
def scaled(x, out, n, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    """Copies x, times a factor, with no mask at all."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) * FACTOR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int8], ids=str)
@pytest.mark.parametrize("factor", [1, 3])
def test_copy_past_both_ends_is_found(dtype, factor, guards_alone):
    """Each guard times a factor must differ from the other."""
    configs = [triton.Config({"BLOCK": 64, "FACTOR": factor})]
    kernel = tritile.autotune(configs, key=["n"], reference=lambda x: {"out": x * factor})(scaled)

    def make(n):
        x = torch.arange(n).to(dtype) % 32
        return {"x": x, "out": torch.empty_like(x), "n": n, "grid": (triton.cdiv(n, 64),)}

    found = tritile.check(kernel, 192, make=make)
    (wrong,) = found.wrong
    assert "wrote outside" in wrong.reason


@pytest.mark.parametrize(("dtype", "filled"), [(torch.float32, "NaN"), (torch.int32, "wrong integers")])
def test_in_place_without_restore_is_advised(dtype, filled):
    (wrong,) = tritile.check(raised_by([True]), torch.zeros(40, dtype=dtype), 40, grid=(3,)).wrong
    assert wrong.reason.endswith("if the kernel reads x, name it in restore_value=")


@triton.jit
def faulty(
    x, y, out, n,
    BLOCK: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """The roots of x: NaN where x is negative."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    root = tl.sqrt(tl.load(x + at, mask=at < n, other=0.0).to(tl.float32))
    if FAULT == "reads":
        root += tl.maximum(tl.load(y + at), 0.0) * 0.0
    if FAULT == "reads and drops":
        root = tl.where(tl.max(tl.load(y + at), 0) > 1.0, 0.0, root)
    if FAULT == "adds nothing":
        tl.atomic_add(y + at, tl.zeros([BLOCK], tl.float32))
    if FAULT == "reads nowhere":
        root += tl.load(y + at + (1 << 58), mask=at < n) * 0.0
    if FAULT == "reads far":
        root += tl.maximum(tl.load(y + at + (1 << 20), mask=at < n), 0.0) * 0.0
    if FAULT == "writes far":
        tl.store(y + at + (1 << 22), 0.0, mask=at < n)
    if FAULT == "destroys":
        tl.store(y + at, 0.0, mask=at < n)
    tl.store(out + at, root, mask=at < n - (FAULT == "leaves out"))


def faulty_arguments(n):
    x = torch.rand(n)
    x[-1] = -1.0
    return {"x": x, "y": torch.rand(n), "out": torch.empty(n), "n": n}


def outcome_of(fault, dtype=torch.float32, reference=lambda x, y: {"out": x.sqrt() + 0 * y}):
    kernel = tritile.autotune([triton.Config({"BLOCK": 64, "FAULT": fault})], ["n"], reference=reference)(
        faulty
    )
    made = {n: v.to(dtype) if isinstance(v, torch.Tensor) else v for n, v in faulty_arguments(200).items()}
    (found,) = tritile.check(kernel, **made, grid=(4,)).configs
    return found


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("reads", "read outside the memory of its arguments: just past the end of y"),
        ("reads and drops", "read outside the memory of its arguments: just past the end of y"),
        ("adds nothing", "wrote outside the memory of its arguments: just past the end of y"),
        ("reads nowhere", "read outside the memory of its arguments"),
        ("reads far", "read outside the memory of its arguments"),
        ("writes far", "wrote outside the memory of its arguments"),
        ("destroys", "y is changed, which the reference takes and does not return"),
        ("leaves out", "out[199] is never written"),
    ],
)
def test_silent_fault_found_interpreted(fault, reason):
    found = outcome_of(fault)
    assert found.outcome == "wrong"
    assert reason in found.reason


def test_what_no_fault_is_is_right():
    """A tensor that the reference does not read is scratch, and NaN may be right."""
    assert outcome_of("").outcome == "right"
    assert outcome_of("destroys", reference=lambda x: {"out": x.sqrt()}).outcome == "right"


@triton.jit
def rows_written(x, out, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    row, at = tl.program_id(0) * stride, tl.arange(0, BLOCK)
    tl.store(out + row + at, tl.load(x + row + at, mask=row + at < 3 * stride + 10), mask=at < WIDTH)


@pytest.mark.parametrize(("width", "outcome"), [(10, "right"), (12, "wrong")])
def test_gaps_may_be_read_not_written(width, outcome):
    configs = [triton.Config({"BLOCK": 16, "WIDTH": width})]
    kernel = tritile.autotune(configs, ["stride"], reference=lambda x: {"out": x.clone()})(rows_written)
    x, out = torch.rand(5, 16)[:4, :10], torch.zeros(5, 16)[:4, :10]
    (found,) = tritile.check(kernel, x, out, 16, grid=(4,)).configs
    assert found.outcome == outcome


@triton.jit
def locked(x, pair, lock, out, n, BLOCK: tl.constexpr, WRITES: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)
    tl.store(lock, 1)
    if WRITES:
        tl.store(pair[0] + at, 0.0, mask=at < n)


@pytest.mark.parametrize("writes", [False, True])
def test_tuple_inputs_stay_hooks_reset(writes):
    def reset(named):
        named["lock"].zero_()

    config = triton.Config({"BLOCK": 64, "WRITES": writes}, pre_hook=None if writes else reset)
    told = {"reference": lambda x, pair, lock: {"out": x}, "restore_value": ["lock"] * writes}
    kernel = tritile.autotune([config], ["n"], **told)(locked)
    lock = torch.ones(1, dtype=torch.int32)
    given = torch.rand(40), (torch.rand(40),), lock, torch.empty(40), 40
    (found,) = tritile.check(kernel, *given, grid=(1,)).configs
    assert found.outcome == ("wrong" if writes else "right"), found.reason
    assert ("pair is changed" in found.reason) is writes


def test_kernel_may_change_reference_inputs():
    config = triton.Config({"BLOCK": 64, "FAULT": "destroys"})
    kernel = tritile.autotune([config], ["n"], reference=lambda x, y: {"out": x.sqrt()})(faulty)
    call = kernel.call((), {"warmup": False, "grid": (4,), **faulty_arguments(200)}, HOST)
    assert decorating.check_in_process(call, config) is not None


@pytest.mark.parametrize(
    ("fault", "outcome"), [("reads and drops", "wrong"), ("destroys", "wrong"), ("", "right")]
)
def test_large_guards_show_maximum_faults(fault, outcome, guards_alone):
    assert outcome_of(fault).outcome == outcome


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_unwritten_element_where_nan_is_right(dtype):
    assert "out[199] is never written" in outcome_of("leaves out", dtype).reason
    assert outcome_of("", dtype).outcome == "right"


@triton.jit
def copied(at, out, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(at).to(tl.pointer_type(tl.float32))
    tl.store(out + place, tl.load(x + place, mask=place < n), mask=place < n)


def test_address_as_number():
    elsewhere = torch.arange(40, dtype=torch.float32)

    kernel = tritile.autotune([triton.Config({"BLOCK": 64})], ["n"], reference=lambda: {"out": elsewhere})(
        copied
    )
    addresses = torch.tensor([elsewhere.data_ptr()])
    assert tritile.check(kernel, addresses, torch.empty(40), 40, grid=(1,))


@triton.jit
def turned(x, out, m, n, BLOCK: tl.constexpr):
    """Takes m for n."""
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    inside = (i < m) & (j < n)
    tl.store(out + j * n + i, tl.load(x + i * n + j, mask=inside), mask=inside)


def test_equal_sizes_followed_by_different():
    kernel = tritile.autotune([triton.Config({"BLOCK": 64})], ["m"], reference=lambda x: {"out": x.t()})(
        turned
    )
    found = tritile.check(
        kernel, 64, 64, make=lambda m, n: (torch.randn(m, n), torch.empty(n, m), m, n), grid=(1,)
    )
    assert found.calls == ("turned m=64 of make(64, 64)", "turned m=63 of make(63, 62)")
    assert found.compared == ("out",)
    assert [each.outcome for each in found.configs] == ["wrong"]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (None, "returned NoneType: expected a dict of right tensors by name"),
        ({}, "returned no tensors"),
        ({"out": 1.0}, "returned dict"),
        (torch.zeros(40), "returned Tensor: expected a dict"),
        ({"y": torch.zeros(40)}, "'y'"),
        ({"out": torch.zeros(3)}, "shape"),
    ],
    ids=["None", "empty", "a number", "a tensor", "no such argument", "another shape"],
)
def test_reference_without_tensors(answer, wanted):
    with pytest.raises(InvalidValueError, match=wanted):
        tritile.check(decorated(reference=lambda x: answer), *arguments(40), grid=(1,))


def test_all_configs_of_space_checked():
    space = tritile.Space({"BLOCK": (16, 32), "LOADS": (True, False), "STORES": (True,), "STOPS": (False,)})
    found = tritile.check(decorated(space), *arguments(63), grid=(1,))
    assert {(c.config.kwargs["BLOCK"], c.config.kwargs["LOADS"], c.outcome) for c in found.configs} == {
        (block, loads, "right" if loads else "wrong") for block in (16, 32) for loads in (True, False)
    }


def test_failing_config_says_why():
    raises = config(24)
    found = tritile.check(decorated([raises, GOOD[0]]), *arguments(64), grid=(1,))
    assert [each.config for each in found.failed] == [raises]
    assert "power of 2" in found.failed[0].reason
    assert [each.config for each in found.right] == [GOOD[0]]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({"grid": None}, "grid="),
        ({"grid": 3}, "grid is 3"),
        ({"grid": (1, 1, 1, 1)}, "one to three sizes"),
        ({"grid": (1.5,)}, "grid is"),
        ({"step": 2}, "summed has no argument 'step': expected x, out, n$"),
        ({"n": 8}, "summed: multiple values for argument 'n'"),
        ({"BLOCK": 16}, "summed: BLOCK given, but configs set it"),
        ({"num_warps": 8}, "summed: num_warps given, but configs set it"),
        ({"make": arguments}, "sizes"),
        ({"make": 5}, "make is 5"),
        (
            {"refernce": right, "grid": None},
            r"summed has no argument 'refernce' \(did you mean 'reference'\?\)$",
        ),
        ({"dvice": "h200", "grid": None}, r"summed has no argument 'dvice' \(did you mean 'device'\?\)$"),
        ({"N": 8}, r"summed has no argument 'N' \(did you mean 'n'\?\)$"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_requests_are_refused(words, wanted):
    with pytest.raises(InvalidValueError, match=wanted):
        tritile.check(decorated(), *arguments(8), **{"grid": (1,)} | words)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda n: list(arguments(n)), 'there is no grid: make has to return .* by name, with "grid" among'),
        (lambda n: {"x": 1, "grid": (1,)}, "what make returned does not fit: summed: missing a required"),
        (
            lambda m, n: arguments(n),
            r"make is called with the sizes \(8,\): missing a required argument: 'n'",
        ),
        (lambda n: None, "make returned NoneType: expected the arguments"),
    ],
)
def test_errors_of_make_named(make, wanted):
    with pytest.raises(InvalidValueError, match=wanted):
        tritile.check(decorated(), 8, make=make)


def test_what_cannot_be_checked_is_refused():
    for kernel, wanted in ((right, "is no kernel"), (decorated(reference=None), "reference=")):
        with pytest.raises(InvalidValueError, match=wanted):
            tritile.check(kernel, *arguments(8), grid=(1,))
    wanted = "summed: missing a required argument: 'out': expected x, out, n"
    with pytest.raises(InvalidValueError, match=wanted):
        tritile.check(decorated(), 8, make=lambda n: {"x": torch.zeros(n)}, grid=(1,))


def test_interpreting_compiles_for_no_gpu():
    with pytest.raises(TuningError, match="TRITON_INTERPRET is set"):
        tritile.check(decorated(), *arguments(8), device="h200")


class Shop:
    """Stands for the processes that compile and check; a config fails as its block says."""

    def __init__(self):
        self.ended, self.begun = [], []

    def begin(self, subject):
        self.begun.append(subject)

    def end(self, subject):
        self.ended.append(subject)

    def compile(self, subject, own):
        done = Future()
        done.set_result(None)
        return done

    def check(self, subject, own):
        if dict(own.kwargs)["BLOCK"] == 32:
            raise TuningError("wrong answer: relative error of out 1, above 0; out[3] is 1, and 2 is right")
        return 0.25


def test_gpu_checks_in_own_process(monkeypatch):
    shop, h200 = Shop(), target_device("nvidia-h200")
    monkeypatch.setattr(Autotuner, "device_of", lambda *given: h200)
    monkeypatch.setattr(checking, "shipped", lambda call: contextlib.nullcontext((shop, call)))
    found = tritile.check(decorated(), *arguments(64), grid=(1,))
    assert [(each.outcome, each.error) for each in found.configs] == [("right", 0.25), ("wrong", None)]
    assert "out[3] is 1, and 2 is right" in found.wrong[0].reason
    assert (found.on, [subject.device for subject in shop.begun]) == (h200, [h200])
    assert shop.ended == shop.begun


def test_unsendable_call_checked_here(monkeypatch):
    monkeypatch.setattr(Autotuner, "device_of", lambda *given: target_device("nvidia-h200"))
    kernel = decorated([*GOOD, UNMASKED])
    refused = tritile.errors.UnsupportedError("its tensors take too much")
    monkeypatch.setattr(checking, "shipped", lambda call: (_ for _ in ()).throw(refused))
    with pytest.warns(IsolationWarning, match="take too much"):
        found = tritile.check(kernel, *arguments(63), grid=(1,))
    assert [each.outcome for each in found.configs] == ["right", "right", "wrong"]


@pytest.mark.parametrize("decorate", [None, triton.autotune, tritile.autotune])
@pytest.mark.parametrize(("stores", "outcome"), [(True, "right"), (False, "wrong")])
def test_reference_of_a_kernel_that_has_none(decorate, stores, outcome):
    """Under an autotuner, and under triton.jit alone, with the options of its launch."""
    values = {"BLOCK": 16, "LOADS": True, "STORES": stores, "STOPS": False}

    def make(n):
        named = dict(zip(("x", "out", "n"), arguments(n), strict=True)) | {"grid": (1,)}
        return named if decorate else named | values | {"num_warps": 8}

    kernel = decorate([config(16, STORES=stores)], key=["n"])(summed) if decorate else summed
    found = tritile.check(kernel, 64, make=make, reference=right)
    assert [(each.outcome, each.config.num_warps) for each in found.configs] == [
        (outcome, 4 if decorate else 8)
    ]
    assert getattr(kernel, "reference", None) is None


MODULE = """
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"BLOCK": b}) for b in (16, 64)], key=["n"])
@triton.jit
def doubled(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

def make(n):
    x = torch.randn(n)
    return {"x": x, "out": torch.empty_like(x), "n": n, "grid": lambda meta: (triton.cdiv(n, meta["BLOCK"]),)}

def doubles(x):
    return {"out": 2 * x}

def copies(x):
    return {"out": x}
"""


@pytest.mark.parametrize(("reference", "outcome"), [("doubles", "right"), ("copies", "wrong")])
def test_command_ends_with_a_status(reference, outcome, tmp_path, monkeypatch):
    (tmp_path / "module_to_check.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    words = ["check", "module_to_check:doubled", "100", "--make", "module_to_check:make", "--json"]
    found = run(*words, "--reference", f"module_to_check:{reference}")
    printed = json.loads(found.stdout)
    assert found.exit_code == (outcome != "right")
    assert printed["passed"] == (outcome == "right")
    assert [each["outcome"] for each in printed["configs"]] == [outcome] * 2
    assert printed["calls"] == ["doubled n=100 of make(100)", "doubled n=99 of make(99)"]


FAILING = """
def make(n):
    raise KeyError("missing")
"""


def test_command_says_where_a_program_fails(tmp_path, monkeypatch):
    (tmp_path / "module_to_fail.py").write_text(MODULE + FAILING)
    monkeypatch.chdir(tmp_path)
    words = "5", "--make", "module_to_fail:make", "--reference", "module_to_fail:doubles"
    why = refused("check", "module_to_fail:doubled", *words, status=1)
    line = (MODULE + FAILING).splitlines().index('    raise KeyError("missing")') + 1
    assert f"KeyError: 'missing' at {tmp_path}/module_to_fail.py:{line}, in make" in why


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ("nowhere", "expected module:name"),
        ("math:nothing", "KERNEL math:nothing: "),
        ("math.py:sqrt", "expected a module, not a file: math:sqrt"),
    ],
)
def test_command_names_what_is_no_kernel(kernel, why):
    assert why in refused("check", kernel, "5", "--make", "math:sqrt")


def test_arguments_by_name_reach_what_prunes():
    """As a call does: in order, so that a pruner finds them among its named arguments."""
    seen = []

    def prune(configs, named_args, **others):
        seen.append(named_args["n"])
        return configs

    kernel = decorated(prune_configs_by={"early_config_prune": prune})
    tritile.check(
        kernel, 8, make=lambda n: dict(zip(("x", "out", "n"), arguments(n), strict=True)), grid=(1,)
    )
    assert seen


def test_configs_left_out_by_pruning_are_counted():
    def prune(configs, named_args, **others):
        return [each for each in configs if each.kwargs["BLOCK"] <= named_args["n"] % 64]

    kernel = decorated(
        [config(size) for size in (16, 32, 64)], prune_configs_by={"early_config_prune": prune}
    )
    found = tritile.check(kernel, 81, make=arguments, grid=(1,))
    assert [each.config.kwargs["BLOCK"] for each in found.right] == [16]
    assert found.pruned == 2
    assert "1 right, 0 wrong, 0 failed, 2 pruned; " in repr(found)
    assert tritile.check(kernel, 113, make=arguments, grid=(1,)).pruned == 1
    assert tritile.check(decorated(), 80, make=arguments, grid=(1,)).pruned == 0
