"""`tritile.sync`: the ranks of a process group exchange what they measured, and choose alike from then on.

Every choice of a config is noted where it is made. `sync` gathers the ranks' notes and then, for the problems
in them, the trials of all stores if these differ, which each rank adds to its own. For each problem the ranks
propose what their stores now say, else what they chose. One proposal wins, and `agreed` returns it at the
next miss: caches that are full, and a store that cannot be written, change nothing about it.

Ranks exchange text: JSON that is checked as if it came from a file.
"""

import contextlib
import functools
import hashlib
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tritile import errors
from tritile.core import device as devices
from tritile.core.config import ATEN, Config
from tritile.core.device import HOST, Device, capturing
from tritile.core.forgetting import Memo, forget
from tritile.core.problem import KernelProblem, Problem, problem_key
from tritile.errors import InvalidValueError, NotTunedError, StoreWarning, TritileError, UnsupportedError
from tritile.tuner.store.files import config_from, problem_from, sifted
from tritile.tuner.store.trial import Trial, best_of
from tritile.tuner.store.trials import Row, environment_from, facts_of, row_of, store_of, trial_from

MEASURED: Final = ("pinned", "exact", "table")  # sources that measured just the problem, the best first
WHY: Final = "the ranks agreed on it in tritile.sync"
_FORMAT: Final = 1  # of what ranks exchange
_MOST: Final = 4096  # choices to note between two calls of `sync`
_BATCH: Final = 256  # problems, the trials of which are exchanged at a time
_SHOWN: Final = 8  # problems, and ranks, that an error lists

Place = str  # JSON of a GPU's facts, digests of kernels, a problem's key, a digest of the configs on offer
Spot = tuple[Row, str, str]  # a GPU's facts, a kernel's digest, a problem's key


class Choice(NamedTuple):
    """A config, and where it comes from: the `source` of a plan."""

    config: Config
    source: str


@dataclass(frozen=True)
class Change:
    """A choice of this process that `tritile.sync` replaced.

    Attributes:
        kernel: name of the decorated kernel, or of tritile's operation.
        problem: what is computed; its `label` is a short name.
        before: the config that ran, or would have.
        after: the config that runs from the next call on.
    """

    kernel: str
    problem: Problem
    before: Config
    after: Config

    def __str__(self) -> str:
        return f"{_named(self.problem)}: {_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True)
class _Note:
    device: Device
    choice: Choice
    remembered: Callable[[], Choice | None]  # what the store says when it is called


_notes: Memo[Place, _Note] = Memo(_MOST)  # the latest choices since the last sync
_agreed: Memo[Place, Choice] = Memo()
_offers: Memo[str, frozenset[Config]] = Memo()  # notes of one list of configs share it


def _named(problem: Problem) -> str:
    return problem.label if isinstance(problem, KernelProblem) else f"{problem.op} {problem.label}"


def _shown(config: Config) -> str:
    return "torch's kernel" if config.family == ATEN else str(config)


# --- Choices ---


def _place(device: Device, kernels: Sequence[str], problem: Problem, offer: str) -> Place:
    return json.dumps([facts_of(device), kernels, problem_key(problem), offer])


def _offer(configs: Iterable[Config]) -> str:
    return hashlib.sha256("\n".join(sorted(config.key for config in configs)).encode()).hexdigest()[:16]


def note(
    device: Device, kernels: Sequence[str], problem: Problem, choice: Choice,
    remembered: Callable[[], Choice | None], offer: str = "",
) -> None:  # fmt: skip
    """Note what was chosen for a problem. `remembered()` returns what the store says when it is called.

    `kernels`: digests of the kernels that were candidates. Choices are compared where all arguments but the
    last two are equal, and `offer`, a digest of the configs to choose among.
    """
    with contextlib.suppress(ValueError, TypeError, RecursionError):  # a problem that no store takes, either
        _notes[_place(device, kernels, problem, offer)] = _Note(device, choice, remembered)


def note_kernel(
    device: Device, digest: str, problem: KernelProblem, choice: Choice, configs: Iterable[Config],
    space: Container[Config] | None = None,
) -> None:  # fmt: skip
    """Note what was chosen for a decorated kernel, among `configs` or all of a space."""
    offer = _offer(configs)
    allowed = space or _offers.get(offer)
    if allowed is None:
        allowed = _offers[offer] = frozenset(configs)
    remembered = functools.partial(_fastest, device, digest, problem, allowed)
    note(device, [digest], problem, choice, remembered, offer)


def _fastest(device: Device, digest: str, problem: Problem, allowed: Container[Config]) -> Choice | None:
    trials = store_of(device).trials(digest, problem)
    best = best_of(trial for trial in trials if trial.config in allowed)
    return None if best is None else Choice(best.config, "exact")


def agreed(
    device: Device, kernels: Sequence[str], problem: Problem, configs: Iterable[Config] | None = None
) -> Choice | None:
    """Return what the ranks agreed on for a problem; None if they did not.

    `configs`: those to choose among, of a decorated kernel.
    """
    if not _agreed:
        return None
    try:
        return _agreed.get(_place(device, kernels, problem, "" if configs is None else _offer(configs)))
    except (ValueError, TypeError, RecursionError):
        return None


# --- The group ---


class _Ranks:
    """The ranks of a group, and their numbers among all processes."""

    def __init__(self, group: Any) -> None:
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            text = "sync: there is no process group: call torch.distributed.init_process_group first"
            raise UnsupportedError(text)
        self._group = distributed.group.WORLD if group is None else group
        if not isinstance(self._group, distributed.ProcessGroup):
            expected = "expected a ProcessGroup that includes this process, or None for all ranks"
            raise InvalidValueError(f"sync: group is {str(group)[:80]!r}: {expected}")
        if capturing():
            raise UnsupportedError("sync: a CUDA graph is being captured: call it before")
        self.numbers = distributed.get_process_group_ranks(self._group)
        self.me = distributed.get_rank(self._group)
        self._gather = distributed.all_gather_object

    def gather(self, make: Callable[[], Any]) -> list[Any]:
        """Return what `make()` returns on each rank, as read from JSON. If it raises on one, raise on all."""
        error: Exception | None = None
        try:
            text = json.dumps({"made": make()})
        except Exception as failure:  # the other ranks wait for an answer
            error = failure
            text = json.dumps({"failed": [type(failure).__name__, str(failure)[:2000]]})
        texts: list[Any] = [None] * len(self.numbers)
        self._gather(texts, text, self._group)
        if error is not None:
            raise error
        made = list[Any]()
        for number, text in zip(self.numbers, texts, strict=True):
            answer = json.loads(text)
            if "failed" in answer:
                name, why = answer["failed"]
                kind: Any = getattr(errors, name, None)
                if not (isinstance(kind, type) and issubclass(kind, TritileError)):
                    kind = TritileError
                raise kind(f"sync failed on rank {number}: {why.removeprefix('sync: ')}")
            made.append(answer["made"])
        return made


@functools.lru_cache(2 * _MOST)
def _parsed(place: Place) -> tuple[Row, tuple[str, ...], str, str]:
    """Return the parts of a place. Raises InvalidValueError for any other text."""
    try:
        facts, kernels, problem, offer = json.loads(place)
        for kernel in kernels:
            environment_from((*facts, kernel))
        problem_from(problem)
        if json.dumps([facts, kernels, problem, offer]) != place or not (kernels and isinstance(offer, str)):
            raise InvalidValueError("it is not in the canonical spelling")
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValueError(f"sync: {place[:80]!r} is not of a choice: {str(error)[:200]}") from error
    return tuple(facts), tuple(kernels), problem, offer


def _to_json(choices: Mapping[Place, Choice]) -> dict[Place, list[str]]:
    return {place: [choice.config.key, choice.source] for place, choice in choices.items()}


def _from_json(data: Any) -> dict[Place, Choice]:
    """Return another rank's choices. Raises InvalidValueError for anything else."""
    found = dict[Place, Choice]()
    try:
        for place, (config, source) in data.items():
            _parsed(place)
            found[place] = Choice(config_from(config), str(source)[:32])
    except (AttributeError, ValueError, TypeError) as error:
        raise InvalidValueError(f"sync: what another rank sent is not valid: {error}") from error
    return found


# --- Comparing ---


def _numbers(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks[:_SHOWN]))}{more}"


def _check_alike(chosen: Sequence[Mapping[Place, Choice]], numbers: Sequence[int]) -> None:
    """Raise NotTunedError if ranks chose different configs for a problem.

    They may if their configs differ: the kernel's pruning may see more of a call than its problem holds.
    But if no two ranks chose among the same kernels, their sources or settings differ.
    """
    found: dict[Any, dict[Place, dict[Config, list[int]]]] = defaultdict(dict)  # by GPU and problem
    for number, choices in zip(numbers, chosen, strict=True):
        for place, choice in choices.items():
            gpu, _, problem, _ = _parsed(place)
            found[gpu, problem].setdefault(place, {}).setdefault(choice.config, []).append(number)
    apart = list[str]()
    for (gpu, problem), places in sorted(found.items(), key=repr):
        differing = [by_config for by_config in places.values() if len(by_config) > 1]
        among: dict[Any, set[int]] = defaultdict(set)  # ranks by the kernels that they chose among
        for place, by_config in places.items():
            among[_parsed(place)[1]].update(*by_config.values())
        if len({config for by_config in places.values() for config in by_config}) > 1:
            differing = differing if set.intersection(*among.values()) else [*places.values()]
        if differing:
            pairs = [pair for by_config in differing for pair in by_config.items()]
            texts = [
                f"{_numbers(ns)}: {_shown(config)}" for config, ns in sorted(pairs, key=lambda pair: pair[1])
            ]
            apart.append(f"{_named(problem_from(problem))} on {gpu[0]} ({'; '.join(texts)})")
    if apart:
        more = f"; and {len(apart) - _SHOWN} more" if len(apart) > _SHOWN else ""
        raise NotTunedError(f"ranks choose different configs for {'; '.join(apart[:_SHOWN])}{more}")


# --- Exchanging ---


def _rows(here: Mapping[Row, Device], spots: Iterable[Spot]) -> dict[Spot, list[Row]]:
    """Return what this process's stores hold, by spot; nothing for other GPUs than its own."""
    grouped: dict[tuple[Row, str], list[str]] = defaultdict(list)
    for gpu, kernel, problem in spots:
        if gpu in here:
            grouped[gpu, kernel].append(problem)
    return {
        (gpu, kernel, problem): rows
        for (gpu, kernel), problems in grouped.items()
        for problem, rows in store_of(here[gpu]).rows(kernel, problems).items()
    }


def _digest(rows: Iterable[Row]) -> str:
    text = json.dumps(sorted(rows, key=lambda row: repr(row[2])), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def merged(trials: Iterable[Trial]) -> list[Trial]:
    """Return one trial of each config of a problem, from those of several stores, the lowest rank's first.

    It is the first that is final; one whose answer was checked, or was wrong, before one that was only timed.
    """
    found = dict[str, Trial]()
    for trial in trials:
        found[trial.config.key] = min(
            found.get(trial.config.key, trial), trial,
            key=lambda each: (not each.is_final, each.works and not each.right),
        )  # fmt: skip
    return list(found.values())


def _add(here: Mapping[Row, Device], batch: Sequence[Spot], received: Iterable[Any]) -> int:
    """Add to this process's stores what ranks sent of the problems of a batch; return how many trials."""

    def checked(spot: Spot, row: Any) -> Trial:
        if not isinstance(row, list) or row[:1] != [spot[2]]:
            raise InvalidValueError("a trial is of another problem")
        try:
            return trial_from(row)
        except ValueError as error:
            raise InvalidValueError(str(error)) from error

    found: dict[Spot, list[Trial]] = defaultdict(list)
    reasons = list[str]()
    for index, rows in (pair for each in received for pair in each):
        spot = batch[index]
        if spot[0] in here:
            trials, bad = sifted(rows, functools.partial(checked, spot))
            found[spot] += trials
            reasons += bad
    if reasons:
        text = f"sync: skipped {len(reasons)} trials of other ranks that are not valid: {reasons[0]}"
        warnings.warn(text, StoreWarning, stacklevel=errors.callers_level())
    new: dict[tuple[Row, str], list[Trial]] = defaultdict(list)
    stored = _rows(here, found)
    for spot, trials in found.items():
        new[spot[:2]] += [trial for trial in merged(trials) if row_of(trial) not in stored[spot]]
    for (gpu, kernel), trials in new.items():
        store_of(here[gpu]).add(kernel, *trials)
    return sum(map(len, new.values()))


def _merge(ranks: _Ranks, here: Mapping[Row, Device], spots: Iterable[Spot]) -> int:
    """Give all ranks with a GPU of one model the same trials of some problems; return how many came here.

    Of ranks with the same trials the first sends them; where all have the same, none does.
    """
    ordered = sorted(spots, key=repr)

    def digests() -> list[str]:
        rows = _rows(here, ordered)
        return [_digest(rows[spot]) if spot in rows else "" for spot in ordered]  # "": of another model

    senders: dict[Spot, set[int]] = {}
    for spot, *of_ranks in zip(ordered, *ranks.gather(digests), strict=True):
        first = {digest: of_ranks.index(digest) for digest in of_ranks if digest}
        if len(first) > 1:
            senders[spot] = set(first.values())
    added = 0
    for start in range(0, len(senders), _BATCH):
        batch = [*senders][start : start + _BATCH]

        def rows_here(batch: Sequence[Spot] = batch) -> Any:
            mine = _rows(here, [spot for spot in batch if ranks.me in senders[spot]])
            return [[index, mine[spot]] for index, spot in enumerate(batch) if spot in mine]

        received = ranks.gather(rows_here)
        added += ranks.gather(functools.partial(_add, here, batch, received))[ranks.me]
    return added


def decided(proposals: Iterable[Mapping[Place, Choice]]) -> dict[Place, Choice]:
    """Return the winners: what was measured before what was guessed, then the lowest rank's."""
    winners = dict[Place, Choice]()
    for proposed in proposals:
        for place, choice in proposed.items():
            winners[place] = min(winners.get(place, choice), choice, key=_order)
    return winners


def _order(choice: Choice) -> int:
    return MEASURED.index(choice.source) if choice.source in MEASURED else len(MEASURED)


def sync(group: Any = None, check: bool = False) -> list[Change]:
    """Have the ranks of a process group choose the same config for each problem, from their next calls on.

    Call it on every rank at the same point of the program, such as after warm-up: it is a collective. Nothing
    but `sync` waits for another rank.

    The ranks exchange what they chose since the last `sync`, and what their stores hold of these problems.
    Each adds the others' trials to its own store; of two of the same config, that of the lower rank counts,
    unless it was only timed and the other was checked. The fastest config is then the winner, as if one
    machine had measured them all. Where nobody measured a problem, or only at other sizes, the lowest rank's
    choice is. Ranks that never saw a problem take its winner when they do. It stays until a later `sync`
    changes it, also after `tritile.forget()`, and is not measured again in mode "tune". Ranks with GPUs of
    different models, or other versions of Triton, exchange only among themselves. Ranks may be on several
    hosts. A CUDA graph, and a function compiled by torch, keeps the configs that it was made with. Of more
    than 4096 problems between two calls, the oldest are left out.

    It covers tritile's operations and kernels under `tritile.autotune` or `tritile.adopt`. Modes, backends
    and other settings stay as they are on each rank; mode "off" ignores what was agreed on.

    Args:
        group: a `torch.distributed.ProcessGroup` that includes this process. Default: all ranks. With NCCL
            what is exchanged goes through the current GPU: call `torch.cuda.set_device` before.
        check: change nothing, and raise if choices since the last `sync` differ between ranks.

    Returns:
        What changed on this rank, a `Change` for each problem. An empty list with `check`.

    Raises:
        NotTunedError: with `check`, if ranks chose different configs; it names kernels, problems and ranks.
        UnsupportedError: there is no process group, or a CUDA graph is being captured.
        InvalidValueError: an argument is wrong, or differs between ranks.
        TritileError: it failed on another rank, which the message names. An error on one rank raises on all,
            except a wrong `group` or a capture: other ranks are then still waiting.
    """
    ranks, notes, here = _Ranks(group), dict(_notes), dict[Row, Device]()

    def chosen_here() -> Any:
        if not isinstance(check, bool):
            raise InvalidValueError(f"sync: check is {check!r}: expected True or False")
        own = (HOST, devices.current_gpu() or HOST, *(each.device for each in notes.values()))
        here.update((facts_of(device), device) for device in own)
        return [_FORMAT, check, _to_json({place: each.choice for place, each in notes.items()})]

    sent = ranks.gather(chosen_here)
    if any(each[0] != _FORMAT for each in sent):
        raise InvalidValueError("sync: ranks run different versions of tritile")
    if any(each[1] != check for each in sent):
        raise InvalidValueError("sync: check is True on some ranks and False on others")
    chosen = [_from_json(each[2]) for each in sent]
    if check:
        _check_alike(chosen, ranks.numbers)
        return []
    places = map(_parsed, {place for each in chosen for place in each})
    added = _merge(ranks, here, {(gpu, kernel, key) for gpu, kernels, key, _ in places for kernel in kernels})
    proposed = ranks.gather(
        lambda: _to_json({place: each.remembered() or each.choice for place, each in notes.items()})
    )
    winners = decided(map(_from_json, proposed))
    changes, unseen = list[Change](), False
    for place in sorted(winners):  # in one order, so that a full memo drops the same on every rank
        (gpu, _, key, _), winner, noted = _parsed(place), winners[place], notes.get(place)
        if gpu not in here:
            continue
        before = _agreed.get(place) if noted is None else noted.choice
        _agreed[place] = winner
        if before is not None and before.config != winner.config:
            problem = problem_from(key)
            kernel = problem.kernel if isinstance(problem, KernelProblem) else problem.op
            changes.append(Change(kernel, problem, before.config, winner.config))
        if noted is None:
            unseen = True
        elif _notes.get(place) is noted:  # else another thread has chosen meanwhile
            _notes.pop(place)
    if changes or added or unseen:
        forget()
    return changes
