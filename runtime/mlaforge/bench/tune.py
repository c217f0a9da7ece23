"""The kernels of several settings of one spec, checked and timed in turn, and which of them is the fastest.

Every candidate runs the same small random problems first and then, in each case, the same tensors as all others. Its
results are compared with the float64 reference by the criteria of `mlaforge.verify`, before it is timed and again
after. The result is plain data that json can write, and it is handed to `save` after every case: a run that is killed
keeps what it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from mlaforge import __version__
from mlaforge.bench.cases import Case, Stats, geometric_mean
from mlaforge.bench.inputs import Cached, OurCall, make_cache, make_problem, our_call
from mlaforge.bench.peers import one_line
from mlaforge.bench.session import BenchError, Save, is_fatal, time_in_turn
from mlaforge.bench.timing import Device, Timed
from mlaforge.bench.watchdog import PATIENCE, Watchdog, WatchedTiming
from mlaforge.reference import decode_reference
from mlaforge.verify import Decoder, Errors, Problem, check_output, random_problems, run_problem, verify_by

FORMAT = 1

LEVEL = 0.01
"""A lead over the planner's own choice that is a smaller share than this is not worth another choice."""


@dataclass(frozen=True)
class Candidate:
    """The kernels of one way to set what a spec leaves open."""

    label: str
    settings: Mapping[str, str | int | bool]
    """Of kernels.decode, by field; empty where the fields stay open."""
    mla: Decoder | None
    """None if there are no kernels."""
    reason: str | None = None
    """Why there are none."""
    planner: bool = False
    """Whether it is what the planner makes of the open fields."""
    kernels: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """By entry point, what the compiler said: `registers` of a thread, bytes of `spills`, WGMMA `serialized` or not."""
    same: Sequence[Mapping[str, str | int | bool]] = ()
    """Other settings that give the same kernels."""


@dataclass(frozen=True)
class Options:
    """What to measure, and how long."""

    cases: tuple[Case, ...]
    """Those of one shape (b, s_k) behind each other, for they share a cache."""
    repeats: int = 30
    """Timed calls of each candidate and case."""
    budget: float | None = None
    """Seconds of the whole run: repeats are lowered to keep it, no case and no candidate is dropped."""
    rest: float = 0.2
    """Seconds without work before each case."""
    examples: int = 24
    """Small random problems that each candidate must solve before it is timed."""
    max_tokens: int = 16_384
    """Cached tokens of such a problem."""
    seed: int = 0
    patience: float = PATIENCE
    """Seconds after which a candidate hangs, in a small problem, in a first run of a case, or while it is timed."""


class Tuning:
    """One run."""

    def __init__(
        self,
        name: str,
        candidates: Sequence[Candidate],
        device: Device,
        options: Options,
        *,
        about: Mapping[str, Any] | None = None,
        started: float | None = None,
        report: Callable[[str], None] = lambda line: None,
        advance: Callable[[str], None] = lambda what: None,
        save: Save = lambda result: None,
        abandon: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        """Prepare a run.

        Args:
            name: of the spec.
            candidates: labels all different; those without kernels are only listed.
            device: where they run.
            options: what to measure.
            about: facts of the machine for the result.
            started: when the run began by `time.perf_counter`, for the budget; now if None.
            report: gets lines of text as results come.
            advance: is told before each step what it is; there are `steps` of them.
            save: gets the result after each case.
            abandon: ends the process when a kernel hangs, called by another thread, for the one that runs is blocked
                for good; the result is complete then, and saved.
        """
        self.device, self.options = device, options
        self._report, self._advance, self._save = report, advance, save
        self._abandon = abandon
        self._watchdog = Watchdog(options.patience)
        self._start = time.perf_counter() if started is None else started
        self._right = {each.label: each.mla for each in candidates if each.mla is not None}
        self._entries: dict[str, dict[str, Any]] = {
            each.label: {
                "label": each.label,
                "settings": dict(each.settings),
                "planner": each.planner,
                "state": "not built" if each.mla is None else "right",
                "reason": each.reason,
                "problem": None,
                "checks": None,
                "kernels": dict(each.kernels),
                "same": [dict(settings) for settings in each.same],
            }
            for each in candidates
        }
        self._planner = next((each.label for each in candidates if each.planner), None)
        some = next((each.mla.manifest for each in candidates if each.mla is not None), None)
        self.result: dict[str, Any] = {
            "format": FORMAT,
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "spec": {"name": name}
            | ({} if some is None else {"d_qk": some.d_qk, "d_v": some.d_v, **dataclasses.asdict(some.cache)}),
            "options": dataclasses.asdict(options),
            "machine": dict(about or {}),
            "versions": {"mlaforge": __version__, "python": platform.python_version(), "torch": torch.__version__},
            "candidates": list(self._entries.values()),
            "cases": [],
            "ranking": [],
            "winner": None,
            "why": None,
            "stopped": None,
        }

    @property
    def steps(self) -> int:
        """How often `advance` is called, if all candidates are right."""
        return len(self._right) + len(self.options.cases)

    def run(self) -> dict[str, Any]:
        """Check and time everything.

        Raises:
            BenchError: the device is no longer usable; what was measured before is in `result`.
            KeyboardInterrupt: likewise.
        """
        try:
            with self._watchdog:
                self._run()
        except BenchError as error:
            self._stop(str(error))
            raise
        except KeyboardInterrupt:
            self._stop("interrupted")
            raise
        return self.result

    def _run(self) -> None:
        for label, mla in list(self._right.items()):
            self._advance(f"checking {label}")
            self._check(label, mla)
        self._keep()
        for (b, s_k), cases in groupby(self.options.cases, key=lambda case: (case.b, case.s_k)):
            some = next(iter(self._right.values()), None)
            if some is None:
                return
            cached = make_cache(some.manifest, self.device.device, b, s_k, self.options.seed)
            for case in cases:
                self._advance(str(case))
                self._case(case, cached)
                self._keep()
            del cached
            self.device.clear()

    def _stop(self, reason: str) -> None:
        self.result["stopped"] = reason
        self._keep()

    def _keep(self) -> None:
        result = self.result
        result["seconds"] = round(time.perf_counter() - self._start, 1)
        result["ranking"] = rank(result["cases"], list(self._right), self._planner)
        result["winner"], result["why"] = choose(result["ranking"], self._planner)
        self._save(result)

    # ---- Checks ------------------------------------------------------------------------------------------------------

    def _check(self, label: str, mla: Decoder) -> None:
        """Run the small problems."""
        options = self.options
        problems = random_problems(mla.manifest, options.examples, options.seed, options.max_tokens)

        def run(problem: Problem) -> Errors:
            with self._watching(label, problem, "a small problem"):
                return run_problem(mla, problem, self.device.device)

        report = verify_by(run, problems, None, self.device.device)
        for errors in report.worst.values():
            self._note(label, errors)
        if report.failure is None:
            self._report(f"{label}: {report.problems} small problems accepted")
            return
        self._exclude(label, "; ".join(report.failure.errors.failures), report.failure.problem)
        try:
            self.device.wait()
        except Exception as error:
            raise BenchError(f"{label} broke the device: {one_line(error)}") from error

    def _watching(self, label: str, problem: Problem, what: str) -> contextlib.AbstractContextManager[None]:
        return self._watchdog.watching(functools.partial(self._hangs, label, problem, what))

    def _hangs(self, label: str | None, problem: Problem, what: str) -> None:
        """Say so, save what there is, and give up; another thread is at it meanwhile, and won't come back."""
        reason = f"{what} did not end within {self._watchdog.seconds:g} s"
        try:
            if label is not None:
                self._exclude(label, reason, problem, "hangs")
            self._stop(f"{label or 'a candidate'} hangs: {reason}")
        finally:
            self._abandon()

    def _note(self, label: str, errors: Errors) -> None:
        """Keep the worst of what was seen of a candidate, JSON's way: without infinities."""
        entry = self._entries[label]
        worst = entry["checks"] or {"out_used": 0.0, "lse_used": 0.0, "cosine": 0.0}
        entry["checks"] = {
            name: max(value, getattr(errors, name)) if math.isfinite(getattr(errors, name)) else value
            for name, value in worst.items()
        }

    def _exclude(self, label: str, reason: str, problem: Problem, state: str = "wrong") -> None:
        self._right.pop(label, None)
        self._entries[label] |= {"state": state, "reason": reason, "problem": str(problem)}
        self._report(f"{label}: {state}, excluded: {reason}")

    # ---- Cases -------------------------------------------------------------------------------------------------------

    def _case(self, case: Case, cached: Cached) -> None:
        begun = time.perf_counter()
        some = next(iter(self._right.values()), None)
        if some is None:
            return
        manifest = some.manifest
        problem = make_problem(manifest, case, cached, self.options.seed)
        want = decode_reference(
            problem.q,
            problem.elements(),
            problem.block_table,
            problem.cache_seqlens,
            d_v=problem.d_v,
            softmax_scale=problem.softmax_scale,
            causal=case.causal,
        )
        calls: dict[str, OurCall] = {}
        timed: dict[str, Timed] = {}
        for label, mla in list(self._right.items()):
            call = our_call(mla, problem)
            if (ready := self._prepared(label, case, call, want)) is not None:
                calls[label], timed[label] = call, ready
        if not timed:
            return
        samples = self._time(timed, case, begun)
        for label, call in calls.items():
            self._accept(label, case, check_output(call.out, call.lse, *want), "after it was timed: ")
        kernels: dict[str, dict[str, Any]] = {}
        for label, times in samples.items():
            if label in self._right:
                stats = Stats.of(times)
                kernels[label] = {
                    "us": dataclasses.asdict(stats),
                    "TFLOPs": case.flops(manifest.d_qk, manifest.d_v) / stats.median / 1e6,
                    "GBps": case.bytes(manifest.d_qk, manifest.d_v, manifest.cache.row_bytes) / stats.median / 1e3,
                }
        if not kernels:
            return
        repeats = min(len(times) for times in samples.values())
        self.result["cases"].append({**dataclasses.asdict(case), "repeats": repeats, "kernels": kernels})
        self._report(str(case))
        planned = kernels.get(self._planner or "")
        for label, each in sorted(kernels.items(), key=lambda item: item[1]["us"]["median"]):
            us = each["us"]
            beside = f"  {us['median'] / planned['us']['median']:.3f} x the planner's" if planned else ""
            self._report(f"  {label:<28} {us['median']:8.1f} us ({us['q1']:.1f} to {us['q3']:.1f}){beside}")

    def _prepared(self, label: str, case: Case, call: OurCall, want: tuple[torch.Tensor, torch.Tensor]) -> Timed | None:
        """Capture a call and judge what a replay gives; None, and the candidate excluded, if it is not right."""
        try:
            with self._watching(label, _as_problem(case), str(case)):
                timed = self.device.prepare(call.run)
            if timed.launch != "graph":
                self._exclude(label, f"{case}: {timed.why}", _as_problem(case))
                return None
            with self._watching(label, _as_problem(case), str(case)):
                call.lse.fill_(math.nan)
                out = self.device.result(timed)
        except Exception as error:
            if is_fatal(error):
                raise BenchError(f"{label} broke the device, {case}: {one_line(error)}") from error
            self._exclude(label, f"{case}: {one_line(error)}", _as_problem(case))
            return None
        return timed if self._accept(label, case, check_output(out, call.lse, *want)) else None

    def _accept(self, label: str, case: Case, errors: Errors, when: str = "") -> bool:
        self._note(label, errors)
        if not errors.ok:
            self._exclude(label, f"{case}, {when}{'; '.join(errors.failures)}", _as_problem(case))
        return errors.ok

    def _time(self, calls: Mapping[str, Timed], case: Case, begun: float) -> dict[str, list[float]]:
        options, problem = self.options, _as_problem(case)
        (samples,) = time_in_turn(
            WatchedTiming(self.device, self._watchdog, lambda label: self._hangs(label, problem, str(case))),
            [calls],
            options.repeats,
            begun=begun,
            deadline=None if options.budget is None else self._start + options.budget,
            cases_left=max(len(options.cases) - len(self.result["cases"]), 1),
            rest=options.rest,
            report=self._report,
        )
        return samples


def _as_problem(case: Case) -> Problem:
    """Give a problem of a case's shape, for `mlaforge verify`."""
    return Problem(lengths=(case.s_k,) * case.b, s_q=case.s_q, h_q=case.h, causal=case.causal)


# ---- Selection -------------------------------------------------------------------------------------------------------


def rank(cases: Sequence[Mapping[str, Any]], labels: Sequence[str], planner: str | None) -> list[dict[str, Any]]:
    """Order candidates by the geometric mean of their medians over all cases, the fastest first.

    Args:
        cases: as in a result.
        labels: the candidates that are right; one that was not timed in every case has no place.
        planner: the label of the planner's own choice, if there is one.

    Returns:
        For each: `label`; `us`, the mean; `ratio`, its mean over the planner's, None if that is not right; `fastest`,
        the number of cases in which no other was faster.
    """
    rated = [label for label in labels if cases and all(label in case["kernels"] for case in cases)]
    medians = {label: [case["kernels"][label]["us"]["median"] for case in cases] for label in rated}
    least = [min(times) for times in zip(*medians.values(), strict=True)]
    means = {label: geometric_mean(times) for label, times in medians.items()}
    own = means.get(planner or "")
    ranking = [
        {
            "label": label,
            "us": mean,
            "ratio": None if own is None or mean is None else mean / own,
            "fastest": sum(time == best for time, best in zip(medians[label], least, strict=True)),
        }
        for label, mean in means.items()
    ]
    return sorted(ranking, key=lambda each: each["us"])


def choose(ranking: Sequence[Mapping[str, Any]], planner: str | None) -> tuple[str | None, str | None]:
    """Give the label to write into the spec, and why it is that one; None of nothing.

    It is the fastest, unless the planner's own choice is level with it.
    """
    if not ranking:
        return None, None
    first = ranking[0]
    if first["label"] == planner:
        return first["label"], "the fastest, and the planner's own choice"
    own = next((each for each in ranking if each["label"] == planner), None)
    if own is None:
        return first["label"], "the fastest"
    lead = 1 - first["us"] / own["us"]
    if lead < LEVEL:
        level = f"level with the fastest ({first['label']}, {lead:.1%} less time)"
        return own["label"], f"the planner's own choice, {level}"
    return first["label"], f"the fastest, {lead:.1%} less time than the planner's own choice"
