"""Mode "spread": no call waits while its configs are measured.

A call that was never measured runs at once, with the best guess. A thread has the configs measured meanwhile,
in the worker processes: those of a decorated kernel on a copy of the call's memory, those of tritile's own
operations (`tune/now.py`) on random operands. The fastest few, each checked, then take turns with the guess
in the program's own calls, between two events that nobody waits for, until one is clearly the fastest. It is
stored, and runs from then on.

Turns that are slower than the guess may add 2% to the time of the calls so far.
"""

import contextlib
import functools
import logging
import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from triton.errors import TritonError

from tritile.core.config import Config
from tritile.core.device import ignore_captures_of_others
from tritile.core.log import log
from tritile.core.settings import spread_bytes
from tritile.core.triton_private import handles_of
from tritile.errors import UnsupportedError, UntunedWarning, brief
from tritile.tuner.arguments import tensors_of
from tritile.tuner.decorated import KernelCall, measured_config, rules_of
from tritile.tuner.measure.engine import now
from tritile.tuner.measure.shipping import duplicate
from tritile.tuner.measure.timing import rank_raced, slower, timing_of
from tritile.tuner.store.trial import Trial, rank
from tritile.tuner.store.trials import store_of

if TYPE_CHECKING:
    from tritile.tuner.autotuner import Autotuner

_CANDIDATES: Final = 3  # configs that take turns with the guess
_CLOSE: Final = 1.15  # slowdown in the workers up to which a config is one of them
_ADDED: Final = 0.02  # of the time of the calls so far
TIMED_US: Final = 30.0  # of shorter launches events time the host: what the workers measured decides
_FAR_BEHIND: Final = 2.0  # slowdown in its first turns, relative to the guess, that ends a config's turns
_FEWEST_TURNS, _MOST_TURNS = 5, 40  # of each config
_TIED: Final = 1.0001  # what a config that is no faster than the winner is stored as, relative to it
COPIES: Final = 4  # of a call's memory on the GPU while it is measured, at least
Ready = Callable[[Any], Callable[[], Any]]  # takes a config, and returns what makes the call with it


@dataclass(eq=False)
class _Candidate:
    """A config that takes turns; `us` are its times in the program's calls, in the order of its turns."""

    config: Any  # as the owner of the problem launches it
    trial: Trial
    us: list[float] = field(default_factory=list)
    turns: int = 0
    is_out: bool = False  # clearly slower than another

    @property
    def expected_us(self) -> float:
        return statistics.median(self.us) if self.us else self.trial.time


@functools.cache
def gate(gpu: int) -> threading.Lock:
    """The lock of a search: one problem at a time has copies in a GPU's memory."""
    return threading.Lock()


def _comes_before_launch(error: Exception) -> bool:
    """True for errors of Triton's: it could not compile, load or launch. A hook may raise after a launch."""
    return isinstance(error, TritonError) or str(error).startswith("Triton Error")


class Turns:
    """Turns of a few configs in the calls of one problem; `guess` runs until they begin.

    A subclass, for each kind of problem, has `_load` and `_store`. It measures in a thread, inside
    `_measured`, and hands over trials to `_begin_turns`. `on_end` is called once a measured config is stored.
    """

    label = ""  # of the problem

    def __init__(self, guess: Any, on_end: Callable[[], object]) -> None:
        self.guess, self._on_end = guess, on_end
        self._lock = threading.Lock()
        self._over = False
        self._calls, self._added_us = 0, 0.0
        self._candidates: list[_Candidate] = []  # the guess is the last
        self._pending: deque[tuple[_Candidate, torch.cuda.Event, torch.cuda.Event, float]] = deque()

    def _load(self, config: Any) -> None:
        """Load a compiled kernel, so that no call of the program waits for it."""
        raise NotImplementedError

    def _store(self, trial: Trial) -> None:
        raise NotImplementedError

    def make(self, ready: Ready, begin: Callable[[], object] = lambda: None) -> Any:
        """Make one call, by `ready(config)()`, with the guess or with the config whose turn it is.

        `begin` is called first, unless a graph is being captured: to have the problem measured.
        """
        self._calls += 1
        if self._over or torch.cuda.is_current_stream_capturing() or not self._lock.acquire(blocking=False):
            return ready(self.guess)()
        try:
            candidate = self._chosen(begin)
            return ready(self.guess)() if candidate is None else self._take_turn(candidate, ready)
        finally:
            self._lock.release()

    def _chosen(self, begin: Callable[[], object]) -> _Candidate | None:
        """Return whose turn it is, None if the guess runs."""
        try:
            begin()
            return self._next() if self._candidates else None
        except Exception as error:  # whatever it is, the program goes on with the guess
            self.give_up(error)
            return None

    def give_up(self, error: Exception) -> None:
        """Stay with the guess."""
        self._over = True

    # In a thread.

    def _measured(self, gpu: int, measure: Callable[[], None]) -> None:
        """Measure. The caller has acquired `gate`; release it at the end."""
        try:
            ignore_captures_of_others()
            torch.cuda.set_device(gpu)  # of this thread
            with torch.cuda.stream(torch.cuda.Stream(gpu)):  # the default one waits for the program's work
                measure()
        except Exception as error:  # whatever it is, the program goes on with the guess
            self.give_up(error)
        finally:
            gate(gpu).release()

    def _begin_turns(
        self, ranked: Sequence[Trial], guessed: Trial | None, named: Callable[[Config], Any] = lambda c: c
    ) -> None:
        """Let the fastest of some trials take turns with the guess, if that is among them."""
        limit = _CLOSE * ranked[0].time
        close = [trial for trial in ranked[:_CANDIDATES] if trial.time <= limit and trial is not guessed]
        if guessed is None or not close or ranked[0].time < TIMED_US:
            return self._end()
        candidates = [_Candidate(named(trial.config), trial) for trial in (*close, guessed)]
        for candidate in candidates:
            self._load(candidate.config)
        self._candidates = candidates
        return None

    # In calls.

    def _next(self) -> _Candidate | None:
        """Return the config whose turn it is; None if a slower one has to wait, or all is over."""
        self._collect()
        left = [candidate for candidate in self._candidates if not candidate.is_out]
        if self._over or not left:
            return None
        guess, candidate = self._candidates[-1], min(left, key=lambda candidate: candidate.turns)
        added = max(0.0, candidate.expected_us - guess.expected_us)
        allowed = _ADDED * self._calls * guess.expected_us
        return None if candidate.turns >= _MOST_TURNS or self._added_us + added > allowed else candidate

    def _take_turn(self, candidate: _Candidate, ready: Ready) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run = None
        try:
            run = ready(candidate.config)
            start.record()
            result = run()
        except Exception as error:
            if candidate is self._candidates[-1] or not (run is None or _comes_before_launch(error)):
                raise
            result = ready(self.guess)()  # raises, too, if not the config but the call is at fault
            self._candidates.remove(candidate)
            failure = f"a call failed: {brief(error)}"
            self._store(replace(candidate.trial, us=None, failure=failure, measured_utc=now()))
            return result
        end.record()
        added = max(0.0, candidate.expected_us - self._candidates[-1].expected_us)
        candidate.turns += 1
        self._added_us += added
        self._pending.append((candidate, start, end, added))
        return result

    def _collect(self) -> None:
        """Read the events that the GPU has passed; leave out what is clearly slower; end if one is left."""
        guess, before = self._candidates[-1], len(self._pending)
        while self._pending and self._pending[0][2].query():
            candidate, start, end, expected = self._pending.popleft()
            us = 1e3 * start.elapsed_time(end)
            candidate.us.append(us)
            self._added_us += max(0.0, us - guess.expected_us) - expected if candidate is not guess else 0.0
            candidate.is_out |= candidate is not guess and min(candidate.us) > _FAR_BEHIND * guess.expected_us
        left = [candidate for candidate in self._candidates if not candidate.is_out]
        rounds = min((len(candidate.us) for candidate in left), default=0)
        if rounds < _FEWEST_TURNS or len(self._pending) == before:
            return
        leader = min(left, key=lambda candidate: statistics.median(candidate.us[:rounds]))
        for candidate in left:
            candidate.is_out = slower(leader.us[:rounds], candidate.us[:rounds])
        left = [candidate for candidate in left if not candidate.is_out]
        if len(left) == 1 or rounds >= _MOST_TURNS:
            self._decide({candidate.trial.config: candidate.us[:rounds] for candidate in left})

    def _decide(self, samples: Mapping[Config, list[float]]) -> None:
        """Store what the turns showed, on the scale of the workers' times: the store then has the choice."""
        first = rank_raced(samples, self._candidates[-1].trial.config)[0]
        timed = [candidate for candidate in self._candidates if candidate.us]
        least, fastest = min(each.trial.time for each in timed), statistics.median(samples[first])
        for candidate in timed:
            times = timing_of(candidate.us)
            us = least if candidate.trial.config == first else least * max(_TIED, times.us / fastest)
            self._store(replace(candidate.trial, us=us, spread=times.spread, measured_utc=now()))
        self._end()

    def _end(self) -> None:
        self._over = True
        self._candidates = []
        self._pending.clear()
        log("tune", logging.INFO, f"{self.label} is measured", problem=self.label)
        self._on_end()


class Spread(Turns):
    """The search for one problem of a decorated kernel, step by step in the program's calls."""

    def __init__(self, tuner: "Autotuner", guess: triton.Config, on_end: Callable[[], object]) -> None:
        super().__init__(guess, on_end)
        self.tuner = tuner
        self._searched = False
        self._call: KernelCall | None = None

    def launch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        """Make one call, by `run(config)`."""
        return self.make(lambda config: functools.partial(run, config), lambda: self._search(args, kwargs))

    def _search(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin to measure, on a copy of this call's memory, unless another problem is being measured."""
        if self._searched:
            return
        tensors = (tensor for value in (*args, *kwargs.values()) for tensor in tensors_of(value))
        gpu = next((tensor.get_device() for tensor in tensors if tensor.is_cuda), None)
        if gpu is None:
            raise UnsupportedError("no tensor of its call is on a GPU")
        if not gate(gpu).acquire(blocking=False):
            return
        self._searched = True
        try:
            call = self.tuner.call(args, kwargs)
            copies = duplicate(call.tensors, spread_bytes() // COPIES)
            copied = replace(call.having(copies), shares_gpu=True)
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(gpu))
            threading.Thread(target=self._measure, args=(copied, gpu, ready), daemon=True).start()
        except Exception:
            gate(gpu).release()
            raise

    def _measure(self, call: KernelCall, gpu: int, ready: torch.cuda.Event) -> None:
        def measure() -> None:
            ready.synchronize()
            tuner = self.tuner.with_arguments(call.args)
            tuner.measures_here = False
            measured_config(tuner, call, replace(rules_of(tuner), checked=_CANDIDATES))
            self._choose_candidates(call)

        self._measured(gpu, measure)

    def give_up(self, error: Exception) -> None:
        super().give_up(error)
        text = f"{self.tuner.base_fn.__qualname__} stays with a guess, which was not measured: {brief(error)}"
        with contextlib.suppress(UntunedWarning):  # of a program that turns warnings into errors
            self.tuner._warn(text, UntunedWarning)

    def _choose_candidates(self, call: KernelCall) -> None:
        trials = store_of(call.device).trials(call.source, call.problem)
        allowed = self.tuner.space or call.configs
        ranked = sorted((t for t in trials if t.works and t.config in allowed), key=rank)
        guessed = next((t for t in ranked if call.config(t.config) == self.guess), None)
        if guessed is not None and call.reference is not None and not guessed.right:
            guessed = None  # its answer was not checked
        self.label, self._call = call.problem.label, call
        try:
            self._begin_turns(ranked, guessed, call.config)
        finally:
            self._call = call.having(dict.fromkeys(call.tensors))  # without the copies, which loading needs

    def _load(self, config: triton.Config) -> None:
        assert self._call is not None
        handles_of(self._call.launch(config, warmup=True))

    def _store(self, trial: Trial) -> None:
        assert self._call is not None
        store_of(self._call.device).add(self._call.source, trial)
