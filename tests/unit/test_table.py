"""Tables: what is exported comes back, the same table gives the same bytes, and bad entries do no harm."""

import json
import math
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from tests.warned import one_warning
from tritile.choose import gpu_tables
from tritile.choose import table as table_module
from tritile.choose.gpu_tables import shipped
from tritile.choose.table import Entry, Table, from_store, read, write
from tritile.core.config import Config
from tritile.core.device import TARGETS, target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import KernelProblem, MatmulProblem, problem_key, problem_to_dict
from tritile.errors import InvalidValueError, StoreWarning
from tritile.families.registry import FAMILIES, digests
from tritile.families.space import illegal
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import Store

DEVICE = replace(TARGETS["nvidia-h200"], triton="3.6.0", compiler="V12.8.93")
PROBLEMS = (
    KernelProblem("mine", (("n", 5), ("x", None)), (("x", "float16"),)),
    MatmulProblem(1, 257, 129, 65, "bfloat16", "bfloat16"),
    MatmulProblem(1, 257, 4096, 65, "bfloat16", "bfloat16"),
    PermuteProblem.transposed(3, 5, 7, 2),
)
CONFIG = Config.of(BLOCK_M=64, BLOCK_N=32, num_warps=8)
ENTRIES = tuple(Entry(problem, CONFIG, 1.5 + index) for index, problem in enumerate(PROBLEMS))
TABLE = Table(DEVICE.to_dict(), {"matmul/tile": "0123", "permute/tile": "4567"}, ENTRIES)


@pytest.fixture(autouse=True)
def _no_silent_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        yield


def test_table_from_file_any_order(tmp_path):
    first, other, third = (tmp_path / "new" / name for name in ("a.json", "b.json", "c.json"))
    write(TABLE, first)
    again = read(first)
    assert again == TABLE
    for each in ENTRIES:
        assert again.find(each.problem) == each
    assert again.find(replace(PROBLEMS[1], m=258)) is None
    assert again.find(replace(PROBLEMS[1], b_layout="column")) is None

    backwards = {name: TABLE.device[name] for name in reversed(TABLE.device)}
    write(Table(backwards, dict(reversed(TABLE.kernels.items())), ENTRIES[::-1]), other)
    write(again, third)
    assert first.read_bytes() == other.read_bytes() == third.read_bytes()
    assert first.read_bytes().endswith(b"\n]\n}\n")
    for entries in ((), (Entry(PROBLEMS[0], CONFIG, None),)):
        made = replace(TABLE, entries=entries)
        write(made, first)
        assert read(first) == made


def test_keys_of_problems_and_configs(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(document(entries=[entry(problem=KEY, config=TEXT)])))
    assert read(tmp_path / "t.json").entries == (Entry(PROBLEMS[1], CONFIG, 2.0),)


def entry(**changes):
    return {"problem": problem_to_dict(PROBLEMS[1]), "config": CONFIG.to_dict(), "us": 2.0} | changes


def document(**changes):
    facts = {"device": TABLE.device, "kernels": TABLE.kernels, "entries": [entry()]}
    return {"format": 3} | facts | changes


KERNEL, PRODUCT, _, PERMUTED = map(problem_to_dict, PROBLEMS)
KEY, FIELDS, TEXT = problem_key(PROBLEMS[1]), CONFIG.to_dict(), CONFIG.key
BAD_PROBLEMS = [
    None, 3, [], {}, "", "{}", "os", "[" * 50_000, '{"op":' * 50_000, "9" * 5000, "x" * 100_000,
    json.dumps({"op": ["matmul"]}), PRODUCT | {"op": "os"}, PRODUCT | {"more": 1}, PRODUCT | {"m": 2**70},
    PRODUCT | {"dtype": ["bfloat16"]}, {name: value for name, value in PRODUCT.items() if name != "m"},
    KEY + " ", KEY.replace(",", ", "), KEY.replace("257", "1" + "0" * 4000),
    KEY.replace('"a_align"', '"a_\\u0061lign"'),
    KERNEL | {"key": 3}, KERNEL | {"key": [["x", math.nan]]}, KERNEL | {"key": [["x", {}]]},
    PERMUTED | {"shape": [{}, 5, 7]}, PERMUTED | {"x_strides": [math.nan, 5, 7]},
]  # fmt: skip
BAD_CONFIGS = [
    None, [], "", "[]", "os", "[" * 50_000, TEXT + " ", TEXT.replace("64", "1e999"),
    TEXT.replace('"BLOCK_M":64', '"BLOCK_M":[64]'), TEXT.replace('"BLOCK_M":64', '"x;import os":64'),
    TEXT.replace('"family":"",', ""), FIELDS | {"pre_hook": "os"}, FIELDS | {"family": "a b"},
    *(FIELDS | {"num_warps": value} for value in (-4, "4", True, 3)),
    *(FIELDS | {"kwargs": value} for value in (None, {"BLOCK_M": [[[[1]]]]}, {"BLOCK_M": math.nan})),
]  # fmt: skip
BAD_TIMES = ["2", True, 0.0, -1.0, math.nan, math.inf, 10**400, [1]]


def each(name, values):
    return [pytest.param(entry(**{name: value}), id=f"{name} {str(value)[-50:]}") for value in values]


@pytest.mark.parametrize(
    "bad",
    [
        None, [], "os", {}, entry(more=1),
        *each("problem", BAD_PROBLEMS), *each("config", BAD_CONFIGS), *each("us", BAD_TIMES),
    ],
)  # fmt: skip
def test_a_bad_entry_is_skipped(tmp_path, bad):
    """And a second one for a problem."""
    path, good = tmp_path / "t.json", entry(problem=problem_to_dict(PROBLEMS[2]))
    path.write_text(json.dumps(document(entries=[bad, good, bad, good | {"us": 1.0}])))
    with one_warning("skipped 3 of 4 entries"):
        table = read(path)
    assert table.entries == (Entry(PROBLEMS[2], CONFIG, 2.0),)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "os", "[" * 100_000, '{"a":' * 100_000, "9" * 5000,
        *(json.dumps({k: v for k, v in document().items() if k != name}) for name in document()),
        *(json.dumps(document(format=value)) for value in (0, 2, 4, "3", True, None, [3])),
        *(json.dumps(document(device=value)) for value in (None, [], {}, {"name": 1}, {"name": "", "": []})),
        *(json.dumps(document(device={"name": "x", "clock": value})) for value in (float("nan"), None, {})),
        *(json.dumps(document(kernels=value)) for value in (None, ["x"], {"matmul/tile": 1})),
        *(json.dumps(document(entries=value)) for value in (None, {}, "x")),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InvalidValueError, match=r"t\.json"):
        read(tmp_path / "t.json")


def test_files_too_large_or_none(tmp_path):
    path, pipe = tmp_path / "t.json", tmp_path / "pipe.json"
    path.write_text(json.dumps(document()) + " " * table_module.MAX_BYTES)
    os.truncate(path, table_module.MAX_BYTES)
    assert len(read(path).entries) == 1
    os.truncate(path, 1 << 40)
    with pytest.raises(InvalidValueError, match=r"t\.json holds more than 8 MiB"):
        read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidValueError, match=r"t\.json is not JSON"):
        read(path)
    os.mkfifo(pipe)
    for other in (pipe, tmp_path, tmp_path / "missing.json"):
        with pytest.raises(InvalidValueError, match="does not exist, or is not a regular file"):
            read(other)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_interrupted_write_keeps_old(tmp_path, monkeypatch, call):
    path = tmp_path / "t.json"
    write(TABLE, path)

    def interrupt(*_):
        assert len(list(tmp_path.iterdir())) == 2  # the new text lies beside the old
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(replace(TABLE, entries=()), path)
    assert read(path) == TABLE
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "changes",
    [
        {"entries": (Entry(PROBLEMS[0], CONFIG, float("nan")),)},
        {"entries": (Entry(PROBLEMS[0], CONFIG, -1.0),)},
        {"entries": (ENTRIES[0], ENTRIES[0])},
        {"device": {"name": "x", "clock": float("inf")}},
        {"device": {}},
        {"kernels": {"matmul/tile": 1}},
    ],
)
def test_unreadable_is_not_written(tmp_path, changes):
    path = tmp_path / "t.json"
    write(TABLE, path)
    with pytest.raises(InvalidValueError):
        write(replace(TABLE, **changes), path)
    assert read(path) == TABLE
    assert list(tmp_path.iterdir()) == [path]


def test_from_store_takes_best(tmp_path):
    store = Store(DEVICE, tmp_path)
    slow = Config.of(BLOCK_M=16)
    for problem in PROBLEMS[1:]:
        digest = TABLE.kernels[FAMILIES[problem.op]["tile"].label]
        store.add(digest, Trial(problem, slow, 5.0))
        store.add(digest, Trial(problem, CONFIG, 2.0))
        store.add("older", Trial(problem, slow, 1.0))
    store.add("0123", Trial(PROBLEMS[0], CONFIG, 1.0))
    made = from_store(store, DEVICE, TABLE.kernels)
    assert made == replace(TABLE, entries=tuple(Entry(p, CONFIG, 2.0) for p in PROBLEMS[1:]))
    write(made, tmp_path / "t.json")
    assert read(tmp_path / "t.json") == made


def test_checked_before_faster_look(tmp_path):
    store, problem = Store(DEVICE, tmp_path), PROBLEMS[1]
    names = {label: label for label in ("matmul/tile", "matmul/descriptor")}
    store.add("matmul/tile", Trial(problem, CONFIG, 5.0, error=1e-3))
    store.add("matmul/descriptor", Trial(problem, Config.of(BLOCK_M=16), 2.0))
    for kernels in (names, dict(reversed(names.items()))):
        assert from_store(store, DEVICE, kernels).entries == (Entry(problem, CONFIG, 5.0),)


def test_shipped_table_read_once(folder):
    (folder / "a.json").write_text("{")
    write(TABLE, folder / "nvidia-h200.json")
    write(TABLE, folder / "nvidia-b200.json")
    with one_warning("a shipped table is not used"):
        found, *_ = shipped(DEVICE)
    assert found == TABLE
    for path in folder.iterdir():
        path.unlink()
    assert shipped(replace(DEVICE, triton="9"))[0] is found
    write(TABLE, folder / "nvidia-b200.json")
    same_file = replace(DEVICE, name="nvidia h200", processors=131)
    assert same_file.slug == DEVICE.slug
    for other in (same_file, TARGETS["sm_100"], TARGETS["gfx942"]):  # the file of one is of another GPU
        assert shipped(other) == ()


def test_shipped_tables_whole_and_legal():
    gpu_tables._like.cache_clear()
    for device in TARGETS.values():
        for found in shipped(device):  # a StoreWarning is an error here
            alike = found.device["processors"] == device.processors
            assert found.device["name"] == device.name or alike
    h200 = target_device("nvidia-h200")
    found = shipped(h200)[0]
    assert len(found.entries) >= 290
    there = replace(h200, triton=found.triton)
    for entry in found.entries:
        assert illegal(entry.config, entry.problem, there) is None
        assert entry.us > 0
    used = {FAMILIES[entry.problem.op][entry.config.family].label for entry in found.entries}
    assert used <= set(found.kernels)
    assert found.kernels.items() <= digests().items()
