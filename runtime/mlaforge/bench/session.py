"""A whole run: our kernels and the peers on the same tensors in turn, the machine's ceilings, and what came of it.

The result is plain data that json can write, and it is handed to `save` after every case: a run that is killed keeps
what it has.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch

from mlaforge import __version__
from mlaforge.bench.cases import (
    ELEMENT_BYTES,
    MEMORY,
    PREFILL,
    Case,
    MemoryCase,
    PrefillCase,
    Stats,
    Suite,
    affordable_repeats,
    geometric_mean,
)
from mlaforge.bench.inputs import Cached, OurBf16, make_cache, make_problem, our_call
from mlaforge.bench.machine import GEMM_FLOPS, EnergyTable, Machine, energy_json, measure_energy
from mlaforge.bench.memory import copy_call, memory_call
from mlaforge.bench.peers import PEERS, Peer, PeerError, Problem, ProblemT, Run, one_line
from mlaforge.bench.power import Meter, Sustained, sustain
from mlaforge.bench.prefill import FA3_NAMES, PREFILL_PEERS, Prefiller, PrefillProblem, make_prefill, prefill_call
from mlaforge.bench.timing import Device, Launch, Timed, Timing, sleep
from mlaforge.memory_verify import MemoryKernelsOf
from mlaforge.reference import cosine_difference
from mlaforge.verify import Decoder

FORMAT = 1
OURS = "mlaforge"
COPY = "copy"
"""What a kernel that moves data is compared with: a copy of as many bytes by one of torch's."""
BF16 = OurBf16.name
"""Our own decode of a bf16 cache: no peer when it comes to the best of them."""

_LEAST_SECONDS = 0.7
_BIG_STREAM = 4 << 30

Predict = Callable[[Case], Mapping[str, Any] | None]
"""What a model says of our kernel on a case."""


_OtherCase = TypeVar("_OtherCase", PrefillCase, MemoryCase)


class Kernels(Decoder, Prefiller, MemoryKernelsOf, Protocol):
    """What `mlaforge.load` returns, as far as a run uses it."""


class BenchError(RuntimeError):
    """The run can't go on; what was measured before is saved."""


class Save(Protocol):
    """Takes the result as far as it is."""

    def __call__(self, result: Mapping[str, Any]) -> None:
        """Write it."""


@dataclass(frozen=True)
class Options:
    """What to measure, and how long."""

    suites: tuple[Suite, ...] = ()
    """Of decode."""
    peers: tuple[str, ...] = tuple(dict.fromkeys((*PEERS, *PREFILL_PEERS)))
    """Names; a kernel's peers are those of its own kind among them."""
    repeats: int = 30
    """Timed calls of each kernel and case."""
    seconds: float = 2.0
    """Of a sustained measurement, after `heat`."""
    heat: float = 0.6
    budget: float | None = None
    """Seconds of the whole run: repeats and seconds are lowered to keep it, no case is dropped."""
    rest: float = 0.2
    """Seconds without work before each case."""
    energy: bool = False
    seed: int = 0
    prefill: tuple[PrefillCase, ...] = ()
    memory: tuple[MemoryCase, ...] = ()


class Session:
    """One run."""

    def __init__(
        self,
        mla: Kernels,
        device: Device,
        options: Options,
        *,
        machine: Machine | None = None,
        meter: Meter | None = None,
        about: Mapping[str, Any] | None = None,
        predict: Predict = lambda case: None,
        report: Callable[[str], None] = lambda line: None,
        advance: Callable[[str], None] = lambda what: None,
        save: Save = lambda result: None,
        bf16: Decoder | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            mla: our kernels.
            device: where they run.
            options: what to measure.
            machine: for the ceilings and energy; none are measured without it.
            meter: for watts and clocks; None if there are no readings.
            about: facts of the machine for the result.
            predict: a model to show beside.
            report: gets lines of text as results come.
            advance: is told before each step what it is; there are `steps` of them.
            save: gets the result after each case.
            bf16: of a quantised cache, our kernels of the same dimensions with one of bf16, to be timed beside.
        """
        self.mla, self.device, self.options = mla, device, options
        self.machine, self.meter, self.predict = machine, meter, predict
        self._report, self._advance, self._save = report, advance, save
        self._start = time.perf_counter()
        self._bf16 = bf16
        self._peers: dict[str, Peer[Problem]] = {}
        self._prefill_peers: dict[str, Peer[PrefillProblem]] = {}
        self.energy: EnergyTable | None = None
        manifest = mla.manifest
        self.result: dict[str, Any] = {
            "format": FORMAT,
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "spec": {
                "name": manifest.name,
                "d_qk": manifest.d_qk,
                "d_v": manifest.d_v,
                "row_bytes": manifest.cache.row_bytes,
                "dtype": manifest.cache.dtype,
                "page_size": manifest.cache.page_size,
            },
            "options": {
                **dataclasses.asdict(options),
                "suites": [dataclasses.asdict(suite) for suite in options.suites],
                "peers": list(options.peers),
            },
            "machine": dict(about or {}),
            "versions": {"mlaforge": __version__, "python": platform.python_version(), "torch": torch.__version__},
            "peers": {},
            "prefill_peers": {},
            "ceilings": {},
            "burst": [],
            "sustained": [],
            "prefill": [],
            "memory": [],
            "energy": None,
            "summary": {},
        }

    @property
    def steps(self) -> int:
        """How often `advance` is called."""
        return 2 + self._cases + self.options.energy

    @property
    def _cases(self) -> int:
        options = self.options
        return sum(len(suite.cases) for suite in options.suites) + len(options.prefill) + len(options.memory)

    def run(self) -> dict[str, Any]:
        """Measure everything.

        Raises:
            BenchError: the device is no longer usable.
        """
        self._advance("peers")
        self._load_peers()
        with self._fatal("the ceilings"):
            self._advance("ceilings")
            if self.machine is not None and (self.options.suites or self.options.prefill):
                try:
                    self._ceilings(self.machine)
                except Exception as error:
                    # Without them the kernels can still be compared with each other.
                    if is_fatal(error):
                        raise
                    self.result["ceilings"] = {}
                    self._report(f"no ceilings: {one_line(error)}")
        for suite in self.options.suites:
            for shape, cases in groupby(suite.cases, key=lambda case: (case.b, case.s_k)):
                cached = make_cache(self.mla.manifest, self.device.device, *shape, self.options.seed)
                for case in cases:
                    self._advance(f"{suite.name}: {case}")
                    with self._fatal(f"{suite.name}, {case}"):
                        self._case(suite, case, cached)
                    self._keep()
                del cached
                self.device.clear()
        for prefill in self.options.prefill:
            self._other(PREFILL, prefill, self._prefill)
        for memory in self.options.memory:
            self._other(MEMORY, memory, self._memory)
        if self.options.energy and self.machine is not None and self.meter is not None:
            self._advance("energy")
            self._report("energy of single operations")
            with self._fatal("the energy of operations"):
                self.energy = measure_energy(self.machine, self.device, self.meter, report=self._report)
            self.result["energy"] = energy_json(self.energy)
        self._keep()
        return self.result

    def _other(self, suite: str, case: _OtherCase, measure: Callable[[_OtherCase], dict[str, Any]]) -> None:
        """Measure a case of another kernel than decode."""
        self._advance(f"{suite}: {case}")
        with self._fatal(f"{suite}, {case}"):
            entry = measure(case)
        self.result[suite].append(entry)
        for line in describe_other(suite, str(case), entry):
            self._report(line)
        self._keep()
        self.device.clear()

    def _keep(self) -> None:
        self.result["seconds"] = round(time.perf_counter() - self._start, 1)
        self.result["summary"] = summarise(self.result)
        self._save(self.result)

    def _fatal(self, what: str) -> _Fatal:
        return _Fatal(self, what)

    # ---- Peers -------------------------------------------------------------------------------------------------------

    def _load_peers(self) -> None:
        """Import those of the kernels that are measured."""
        chosen = self.options.peers
        if self.options.suites:
            peers: list[Peer[Problem]] = [] if self._bf16 is None else [OurBf16(self._bf16)]
            peers += [PEERS[name]() for name in chosen if name in PEERS]
            self._peers = self._load(peers, self.result["peers"], "")
        if self.options.prefill:
            others = [PREFILL_PEERS[name]() for name in chosen if name in PREFILL_PEERS]
            self._prefill_peers = self._load(others, self.result["prefill_peers"], "prefill, ")
        self._keep()

    def _load(self, peers: Sequence[Peer[ProblemT]], entries: dict[str, Any], kind: str) -> dict[str, Peer[ProblemT]]:
        found = {}
        for peer in peers:
            entry: dict[str, Any] = {"title": peer.title, "state": "ready", "reason": None, "version": None}
            try:
                peer.load()
            except PeerError as error:
                entry |= {"state": "missing", "reason": str(error)}
            else:
                entry["version"] = peer.version()
                found[peer.name] = peer
            entries[peer.name] = entry
            self._report(f"{kind}{peer.name}: {entry['reason'] or 'found'}")
        return found

    # ---- Ceilings ----------------------------------------------------------------------------------------------------

    def _ceilings(self, machine: Machine) -> None:
        """Time the matrix product, and for decode the read stream over each case's cache and over 4 GiB."""
        cases = [case for suite in self.options.suites for case in suite.cases]
        caches = {case.tokens * self.mla.manifest.cache.row_bytes for case in cases}
        sizes = (*sorted(caches), _BIG_STREAM) if caches else ()
        data = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=machine.device)
        data.view(torch.int32).random_()
        calls = {f"read {size}": machine.read_stream(data[:size]) for size in sizes}
        timed = {name: self.device.prepare(run) for name, run in calls.items()}
        timed["gemm"] = self.device.prepare(machine.gemm())
        self.device.time(timed, 2)
        stats = {name: Stats.of(samples) for name, samples in self.device.time(timed, 20).items()}
        read: list[dict[str, Any]] = []
        for size in sizes:
            whole = size // machine.tile_bytes * machine.tile_bytes
            of_size = stats[f"read {size}"]
            read.append({"bytes": whole, "us": dataclasses.asdict(of_size), "GBps": whole / of_size.median / 1e3})
        gemm = stats["gemm"]
        product = {"us": dataclasses.asdict(gemm), "TFLOPs": GEMM_FLOPS / gemm.median / 1e6}
        self.result["ceilings"] = {"read_stream": read, "gemm": product}
        for each in read:
            self._report(f"read stream of {each['bytes'] / 1e6:,.0f} MB in random tiles: {each['GBps']:,.0f} GB/s")
        self._report(f"bf16 product of 8192^3: {product['TFLOPs']:.0f} TFLOP/s")
        if any(suite.mode == "sustained" for suite in self.options.suites):
            seconds = min(self.options.seconds, 1.5)
            big = sustain(self.device, timed[f"read {_BIG_STREAM}"], self.meter, seconds=seconds, heat=0.4)
            whole = _BIG_STREAM // machine.tile_bytes * machine.tile_bytes
            held = sustain(self.device, timed["gemm"], self.meter, seconds=seconds, heat=self.options.heat)
            self.result["ceilings"]["sustained"] = {
                "read_stream": {**_sustained_json(big), "GBps": whole / big.us / 1e3},
                "gemm": {**_sustained_json(held), "TFLOPs": GEMM_FLOPS / held.us / 1e6},
            }
            self._report(f"sustained read stream: {whole / big.us / 1e3:,.0f} GB/s, {_power_words(big)}")
            self._report(f"sustained bf16 product: {GEMM_FLOPS / held.us / 1e6:.0f} TFLOP/s, {_power_words(held)}")
        del data, calls, timed
        self.device.clear()
        self._keep()

    # ---- Cases -------------------------------------------------------------------------------------------------------

    def _case(self, suite: Suite, case: Case, cached: Cached) -> None:
        begun = time.perf_counter()
        problem = make_problem(self.mla.manifest, case, cached, self.options.seed)
        entry: dict[str, Any] = {"suite": suite.name, **dataclasses.asdict(case), "kernels": {}}
        kernels: dict[str, Any] = entry["kernels"]
        ready: dict[str, Timed] = {}
        anew: dict[str, Timed] = {}
        kernels[OURS], ready[OURS], want = self._prepare_ours(our_call(self.mla, problem).run, _with_nan)
        anew[OURS] = ready[OURS]
        calls = self._prepare_peers(self._peers, self.result["peers"], problem, want, kernels, suite.mode == "burst")
        for kind, timed in (("ready", ready), ("anew", anew)):
            timed |= {name: each[kind] for name, each in calls.items() if kind in each}
        if suite.mode == "burst":
            self._burst(entry, case, ready, anew, begun)
            self.result["burst"].append(entry)
        else:
            self._sustained(entry, case, ready)
            self.result["sustained"].append(entry)
        entry |= self._compared(entry, case, suite.mode)
        predicted = self.predict(case)
        entry["predicted"] = None if predicted is None else dict(predicted)
        for line in describe_case(entry):
            self._report(line)

    def _prepare_ours(
        self, run: Run, check: Callable[[torch.Tensor], str | None]
    ) -> tuple[dict[str, Any], Timed, torch.Tensor]:
        """Capture our own call and check what it gives; what is said of it, the call, and its result."""
        try:
            timed = self.device.prepare(run)
            made = self.device.result(timed).clone()
            wrong = check(made)
        except Exception as error:
            raise BenchError(f"our own call: {one_line(error)}") from error
        if wrong:
            raise BenchError(f"our own call: {wrong}")
        return {"launch": timed.launch, "planning": "none", "note": timed.why}, timed, made

    def _prepare_peers(
        self,
        peers: Mapping[str, Peer[ProblemT]],
        found: Mapping[str, Mapping[str, Any]],
        problem: ProblemT,
        want: torch.Tensor,
        kernels: dict[str, Any],
        with_anew: bool,
    ) -> dict[str, dict[str, Timed]]:
        """Capture the calls of all peers, and note in `kernels` what is said of each, the missing among `found` too."""
        calls = {}
        for name, peer in peers.items():
            kernels[name], calls[name] = self._prepare_peer(peer, problem, want, with_anew)
        for name, each in found.items():
            if each["state"] == "missing":
                kernels[name] = {"reason": each["reason"]}
        return calls

    def _prepare_peer(
        self, peer: Peer[ProblemT], problem: ProblemT, want: torch.Tensor, with_anew: bool
    ) -> tuple[dict[str, Any], dict[str, Timed]]:
        """Capture a peer's calls and check what they give; what is said of it, and the calls that are right."""
        if reason := peer.refuses(problem):
            return {"reason": reason}, {}
        said: dict[str, Any] = {}
        calls: dict[str, Timed] = {}
        try:
            prepared = peer.prepare(problem)
            said = {"planning": prepared.planning, "note": prepared.note}
            kinds: list[tuple[str, Run, Launch]] = [("ready", prepared.ready, "graph")]
            if with_anew and prepared.planning != "none":
                kinds.append(("anew", prepared.anew, "host" if prepared.planning == "host" else "graph"))
            for kind, run, launch in kinds:
                timed = self.device.prepare(run, launch)
                cosine, largest = difference(self.device.result(timed), want)
                if timed.launch == "graph" and not cosine < peer.cosine_tolerance:
                    # Work on a stream of the peer's own is not captured; launched plainly it may be right.
                    timed = dataclasses.replace(self.device.prepare(run, "launches"), why="a captured graph is wrong")
                    cosine, largest = difference(self.device.result(timed), want)
                suffix = "" if kind == "ready" else "_anew"
                said |= {
                    f"launch{suffix}": timed.launch,
                    f"check{suffix}": {"cosine": _finite(cosine), "max_abs": _finite(largest)},
                }
                if timed.why and timed.launch == "launches":
                    said["note"] = "; ".join(filter(None, (said["note"], timed.why)))
                if not cosine < peer.cosine_tolerance:
                    said[f"reason{suffix}"] = f"its result is not ours: 1 - cos {cosine:.1e}, largest {largest:.1e}"
                    break
                calls[kind] = timed
            if with_anew and prepared.planning == "none" and "ready" in calls:
                calls["anew"] = calls["ready"]
        except Exception as error:
            if is_fatal(error):
                raise BenchError(f"{peer.name} broke the device: {one_line(error)}") from error
            said["reason_anew" if "ready" in calls else "reason"] = one_line(error)
        return said, calls

    def _burst(
        self, entry: dict[str, Any], case: Case, ready: dict[str, Timed], anew: dict[str, Timed], begun: float
    ) -> None:
        """Time all calls in turn, then the same with planning in them."""
        samples, samples_anew = self._time([ready, anew], begun)
        entry["repeats"] = len(samples[OURS])
        for name, times in samples.items():
            stats = Stats.of(times)
            entry["kernels"][name] |= {"us": dataclasses.asdict(stats), **self._rates(name, case, stats.median)}
        for name, times in samples_anew.items():
            entry["kernels"][name]["us_anew"] = dataclasses.asdict(Stats.of(times))

    def _rates(self, name: str, case: Case, us: float) -> dict[str, float]:
        """Give the work and the traffic of a call over its time."""
        manifest = self.mla.manifest
        widths = manifest.d_qk, manifest.d_v
        row_bytes = ELEMENT_BYTES * manifest.d_qk if name == BF16 else manifest.cache.row_bytes
        return {"TFLOPs": case.flops(*widths) / us / 1e6, "GBps": case.bytes(*widths, row_bytes) / us / 1e3}

    def _cases_left(self) -> int:
        done = sum(len(self.result[kind]) for kind in ("burst", "sustained", PREFILL, MEMORY))
        return max(self._cases - done, 1)

    def _sustained(self, entry: dict[str, Any], case: Case, ready: Mapping[str, Timed]) -> None:
        """Run each call for seconds."""
        for number, (name, timed) in enumerate(ready.items()):
            seconds, heat = self._affordable_seconds(len(ready) - number, len(ready))
            held = sustain(self.device, timed, self.meter, seconds=seconds, heat=heat)
            joules = held.joules_per_call
            entry["kernels"][name] |= {
                **_sustained_json(held),
                **self._rates(name, case, held.us),
                "nJ_per_token": None if joules is None else 1e9 * joules / case.tokens,
            }

    def _affordable_seconds(self, kernels_left: int, kernels: int) -> tuple[float, float]:
        seconds, heat, budget = self.options.seconds, self.options.heat, self.options.budget
        if budget is None:
            return seconds, heat
        left = kernels_left + (self._cases_left() - 1) * kernels
        each = (budget - (time.perf_counter() - self._start)) / left - 0.1
        share = min(each / (seconds + heat), 1.0)
        return max(seconds * share, _LEAST_SECONDS), max(heat * share, 0.3)

    def _compared(self, entry: Mapping[str, Any], case: Case, mode: str) -> dict[str, Any]:
        """Compare ours with the others, the best peer and the ceiling."""
        kernels: Mapping[str, Any] = entry["kernels"]
        made: dict[str, Any] = {}
        for key, suffix in (("us", ""), ("us_anew", "_anew")) if mode == "burst" else (("us", ""),):
            times = {
                name: each[key]["median"] if mode == "burst" else each[key]
                for name, each in kernels.items()
                if key in each
            }
            best, ratio = _against_best(times)
            made |= {f"best_peer{suffix}": best, f"ratio{suffix}": ratio}
            if key == "us":
                made["ratios"] = _against_each(times)
        if mode == "sustained":
            spent = {name: each["nJ_per_token"] for name, each in kernels.items() if each.get("nJ_per_token")}
            mine = spent.pop(OURS, None)
            spent.pop(BF16, None)
            made["energy_ratio"] = mine / min(spent.values()) if mine and spent else None
        ceilings = self.result["ceilings"]
        if ceilings and mode == "burst":
            manifest = self.mla.manifest
            size = case.tokens * manifest.cache.row_bytes
            stream = min(ceilings["read_stream"], key=lambda each: abs(each["bytes"] - size))["GBps"]
            made["of_read_stream"] = kernels[OURS]["GBps"] / stream
            made["of_gemm"] = kernels[OURS]["TFLOPs"] / ceilings["gemm"]["TFLOPs"]
        return made

    # ---- Other kernels -----------------------------------------------------------------------------------------------

    def _prefill(self, case: PrefillCase) -> dict[str, Any]:
        """Time prefill and its peers."""
        begun = time.perf_counter()
        problem = make_prefill(self.mla.manifest, case, self.device.device, self.options.seed)
        kernels: dict[str, Any] = {}
        ready: dict[str, Timed] = {}
        kernels[OURS], ready[OURS], want = self._prepare_ours(prefill_call(self.mla, problem), _with_nan)
        found = self.result["prefill_peers"]
        calls = self._prepare_peers(self._prefill_peers, found, problem, want, kernels, False)
        ready |= {name: each["ready"] for name, each in calls.items() if "ready" in each}
        medians = self._in_turn(ready, kernels, begun)
        flops = case.flops(problem.d_qk, problem.d_v)
        for name, median in medians.items():
            kernels[name]["TFLOPs"] = flops / median / 1e6
        best, ratio = _against_best(medians)
        _, ratio_fa3 = _against_best({name: medians[name] for name in (OURS, *FA3_NAMES) if name in medians})
        gemm = self.result["ceilings"].get("gemm")
        return {
            "suite": PREFILL,
            **dataclasses.asdict(case),
            "d_qk": problem.d_qk,
            "d_v": problem.d_v,
            "repeats": kernels[OURS]["us"]["count"],
            "kernels": kernels,
            "best_peer": best,
            "ratio": ratio,
            "ratios": _against_each(medians),
            "ratio_fa3": ratio_fa3,
            "of_gemm": kernels[OURS]["TFLOPs"] / gemm["TFLOPs"] if gemm else None,
        }

    def _memory(self, case: MemoryCase) -> dict[str, Any]:
        """Time a kernel that moves data, and a copy of as many bytes."""
        begun = time.perf_counter()
        call = memory_call(self.mla, case, self.device.device, self.options.seed)
        copy, copied = copy_call(call.bytes, self.device.device)
        kernels: dict[str, Any] = {}
        ready: dict[str, Timed] = {}
        kernels[OURS], ready[OURS], _ = self._prepare_ours(call.run, call.check)
        ready[COPY] = self.device.prepare(copy)
        kernels[COPY] = {"launch": ready[COPY].launch, "planning": "none", "note": ready[COPY].why}
        medians = self._in_turn(ready, kernels, begun)
        for name, size in ((OURS, call.bytes), (COPY, copied)):
            kernels[name]["GBps"] = size / medians[name] / 1e3
        return {
            "suite": MEMORY,
            **dataclasses.asdict(case),
            "bytes": call.bytes,
            "repeats": kernels[OURS]["us"]["count"],
            "kernels": kernels,
            "of_copy": kernels[OURS]["GBps"] / kernels[COPY]["GBps"],
        }

    def _in_turn(
        self, ready: Mapping[str, Timed], kernels: Mapping[str, dict[str, Any]], begun: float
    ) -> dict[str, float]:
        """Time the calls of a case and note their statistics; gives their medians."""
        (samples,) = self._time([ready], begun)
        stats = {name: Stats.of(times) for name, times in samples.items()}
        for name, each in stats.items():
            kernels[name]["us"] = dataclasses.asdict(each)
        return {name: each.median for name, each in stats.items()}

    def _time(self, groups: Sequence[Mapping[str, Timed]], begun: float) -> list[dict[str, list[float]]]:
        options = self.options
        return time_in_turn(
            self.device,
            groups,
            options.repeats,
            begun=begun,
            deadline=None if options.budget is None else self._start + options.budget,
            cases_left=self._cases_left(),
            rest=options.rest,
            report=lambda line: self._report(f"  {line}"),
        )


def _with_nan(made: torch.Tensor) -> str | None:
    return "it left NaN in its result" if made.isnan().any() else None


def _against_best(times: Mapping[str, float]) -> tuple[str | None, float | None]:
    """Give the fastest peer, and its time over ours; None if there is no other."""
    best = min((name for name in times if name not in (OURS, BF16)), key=lambda name: times[name], default=None)
    return best, None if best is None else times[best] / times[OURS]


def _against_each(times: Mapping[str, float]) -> dict[str, float]:
    """Give the time of each other kernel over ours."""
    return {name: us / times[OURS] for name, us in times.items() if name != OURS}


class _Fatal:
    """Turns a fault of the device into a BenchError that says where, with everything saved."""

    def __init__(self, session: Session, what: str) -> None:
        self._session, self._what = session, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and (is_fatal(error) or isinstance(error, BenchError)):
            reason = f"{self._what}: {error if isinstance(error, BenchError) else one_line(error)}"
            self._session.result["stopped"] = reason
            self._session._keep()
            raise BenchError(reason) from error


def time_in_turn(
    device: Timing,
    groups: Sequence[Mapping[str, Timed]],
    repeats: int,
    *,
    begun: float,
    deadline: float | None,
    cases_left: int,
    rest: float,
    report: Callable[[str], None],
) -> list[dict[str, list[float]]]:
    """Time the calls of each group in turn; an untimed round of all brings the clock up, and says how long it takes.

    Args:
        device: where they run.
        groups: calls that are ready to be timed; one group after the other, each after a rest and an untimed round.
        repeats: rounds, fewer if the deadline asks for it.
        begun: when the case began by `time.perf_counter`.
        deadline: when the whole run should end; None if there is no hurry.
        cases_left: this one among them.
        rest: seconds without work before the rounds of a group.
        report: is told if there are fewer rounds.

    Returns:
        Of each group the times of each call, microseconds.

    Raises:
        BenchError: a call can't be timed.
    """
    try:
        start = time.perf_counter()
        for calls in groups:
            device.time(calls, 1)
        wanted = repeats
        if deadline is not None:
            now = time.perf_counter()
            repeats = affordable_repeats(
                wanted,
                deadline - now,
                cases_left,
                round_seconds=now - start,
                overhead=start - begun,
                rest=len(groups) * rest,
            )
            if repeats < wanted:
                report(f"{repeats} instead of {wanted} repeats, to keep the budget")
        made = []
        for calls in groups:
            sleep(rest)
            device.time(calls, 1)
            made.append(device.time(calls, repeats))
    except Exception as error:
        names = dict.fromkeys(name for calls in groups for name in calls)
        raise BenchError(f"timing {', '.join(names)}: {one_line(error)}") from error
    return made


def is_fatal(error: BaseException) -> bool:
    """Whether a CUDA context is of no use after an error: a fault of a kernel stays for good."""
    text = str(error).lower()
    faults = ("illegal memory access", "misaligned address", "launch failure", "illegal instruction", "illegal address")
    return any(fault in text for fault in faults)


def difference(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Give the cosine difference, NaN if all is zero, and the largest difference of an element; NaN of NaN."""
    x, y = got.double(), want.double()
    cosine = cosine_difference(x, y) if bool(x.any() or y.any()) else float("nan")
    return cosine, float((x - y).abs().max())


def _finite(value: float) -> float | None:
    # JSON knows neither NaN nor infinities.
    return value if math.isfinite(value) else None


def _sustained_json(held: Sustained) -> dict[str, Any]:
    return {
        "us": held.us,
        "measured_seconds": held.seconds,
        "watts": held.watts,
        "mhz": held.mhz,
        "throttle_reasons": list(held.reasons),
    }


def _power_words(held: Sustained) -> str:
    if held.watts is None or held.mhz is None:
        return "no power readings"
    why = f" ({', '.join(held.reasons)})" if held.reasons else ""
    return f"{held.watts:.0f} W, {held.mhz:.0f} MHz{why}"


# ---- Words -----------------------------------------------------------------------------------------------------------


def describe_case(entry: Mapping[str, Any]) -> Iterator[str]:
    """Give the lines that a run prints for a case, one for each kernel; `x ours` is its time in units of ours."""
    case = Case(entry["b"], entry["s_k"], entry["h"], entry["s_q"])
    kernels: Mapping[str, Any] = entry["kernels"]
    yield f"{entry['suite']}: {case}"
    ours = kernels[OURS]["us"]
    for name, each in kernels.items():
        if "us" not in each:
            yield f"  {name:<14} not timed: {each['reason']}"
        elif isinstance(each["us"], Mapping):
            us = each["us"]
            anew = f"{each['us_anew']['median']:8.1f}" if "us_anew" in each else "       -"
            marks = "" if each["launch"] == "graph" else "  plain launches"
            marks += "  anew: with the host" if each.get("launch_anew") == "host" else ""
            marks += f"  anew: {each['reason_anew']}" if "reason_anew" in each else ""
            yield (
                f"  {name:<14} {us['median']:8.1f} us ({us['q1']:.1f} to {us['q3']:.1f})  anew {anew}  "
                f"{each['TFLOPs']:5.0f} TFLOP/s  {each['GBps']:5.0f} GB/s  {us['median'] / ours['median']:.3f} x ours"
                f"{marks}"
            )
        else:
            power = "" if each["watts"] is None else f"  {each['watts']:4.0f} W  {each['mhz']:4.0f} MHz"
            nj = "" if each["nJ_per_token"] is None else f"  {each['nJ_per_token']:4.0f} nJ/token"
            why = f"  {', '.join(each['throttle_reasons'])}" if each["throttle_reasons"] else ""
            yield (
                f"  {name:<14} {each['us']:8.1f} us  {each['TFLOPs']:5.0f} TFLOP/s  {each['GBps']:5.0f} GB/s"
                f"{power}{nj}  {each['us'] / ours:.3f} x ours{why}"
            )


def describe_other(suite: str, case: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Give the lines that a run prints for a case of another kernel than decode, as those of `describe_case` are."""
    yield f"{suite}: {case}"
    kernels: Mapping[str, Any] = entry["kernels"]
    ours = kernels[OURS]["us"]["median"]
    for name, each in kernels.items():
        if "us" not in each:
            yield f"  {name:<14} not timed: {each['reason']}"
            continue
        us = each["us"]
        rate = f"{each['TFLOPs']:5.0f} TFLOP/s" if "TFLOPs" in each else f"{each['GBps']:5.0f} GB/s"
        marks = "" if each["launch"] == "graph" else "  plain launches"
        yield (
            f"  {name:<14} {us['median']:8.1f} us ({us['q1']:.1f} to {us['q3']:.1f})  {rate}  "
            f"{us['median'] / ours:.3f} x ours{marks}"
        )


def summarise(result: Mapping[str, Any]) -> dict[str, Any]:
    """Give geometric means of the ratios to the best peer of each point and to each kernel, and who won where.

    Those of decode are by suite and rows, that of prefill is over all its cases; `memory` has shares of a copy's rate.
    """
    summary: dict[str, Any] = {}
    for mode in ("burst", "sustained"):
        groups: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
        for entry in result[mode]:
            groups.setdefault((entry["suite"], entry["h"], entry["s_q"]), []).append(entry)
        summary[mode] = [
            {"suite": suite, "h": h, "s_q": s_q, **_group_summary(entries, mode)}
            for (suite, h, s_q), entries in groups.items()
        ]
    if result[PREFILL]:
        summary[PREFILL] = _group_summary(result[PREFILL], PREFILL)
    if shares := [entry["of_copy"] for entry in result[MEMORY]]:
        summary[MEMORY] = {"cases": len(shares), "of_copy": geometric_mean(shares), "least_of_copy": min(shares)}
    return summary


_MEANS = {
    "burst": ("ratio_anew", "of_read_stream", "of_gemm"),
    "sustained": ("energy_ratio",),
    PREFILL: ("ratio_fa3", "of_gemm"),
}
"""What else a summary has the geometric means of."""


def _group_summary(entries: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Any]:
    def values(key: str) -> list[float]:
        return [entry[key] for entry in entries if entry.get(key) is not None]

    ratios = values("ratio")
    made: dict[str, Any] = {
        "cases": len(entries),
        "ratio": geometric_mean(ratios),
        "least_ratio": min(ratios, default=None),
        "wins": sum(ratio >= 1 for ratio in ratios),
        "losses": sum(ratio < 1 for ratio in ratios),
    }
    made |= {key: geometric_mean(values(key)) for key in _MEANS[mode]}
    names = dict.fromkeys(name for entry in entries for name in entry["ratios"])
    each = {name: [entry["ratios"][name] for entry in entries if name in entry["ratios"]] for name in names}
    return made | {"ratios": {name: geometric_mean(of_kernel) for name, of_kernel in each.items()}}
