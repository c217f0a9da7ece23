"""The page about a spec: whole, safe whatever is in it, and true to what it shows."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from documents import ROOT, read_blocks
from mlaforge import trace
from mlaforge.compiler import CompiledKernel
from mlaforge.manifest import read_manifest
from mlaforge.simulator import CompilerMissingError
from mlaforge_generator import cli
from mlaforge_generator.block import SmemMap
from mlaforge_generator.plan import Plan, make_plan
from mlaforge_generator.report import Checked, Compiled, Edge, ResultsError, Verification, read_results, report_page
from mlaforge_generator.report.pictures import smem_picture, spread
from mlaforge_generator.report.plots import plots
from mlaforge_generator.report.results import Result as BenchResult
from mlaforge_generator.report.svg import Picture, embed
from mlaforge_generator.resources import find_spec, spec_dir
from mlaforge_generator.spec import load_spec, parse_spec
from test_cli import Decoders
from test_cli import on_cpu as on_cpu
from test_verify import one_thread as one_thread

RESULTS = ROOT / "benchmarks" / "results"
SHIPPED = sorted(path.stem for path in spec_dir().glob("*.yaml"))
SECTIONS = ("plan", "resources", "verification", "timeline", "benches", "spec")
# The spec of the documents: the same kernels are compiled for both.
(SMALL,) = [block.text for block in read_blocks(ROOT / "docs" / "tour.md") if block.head == "# tour.yaml"]
EVIL = "<img src=x onerror=alert(1)></title></style></svg>\"'&{{ 7*7 }}\x00\x1b\ud7ff"


# ---- Reading a page --------------------------------------------------------------------------------------------------

VOID = {"meta", "br"}
# All that pages are made of; what is not here came in by a name.
TAGS = re.compile(
    "html|head|title|meta|style|body|header|main|footer|section|article|nav|h[123]|p|br|a|b|code|pre|dl|div|dt|dd|figure|"
    "figcaption|details|summary|table|caption|thead|tbody|tr|th|td|span|svg|text|rect|path|circle|g"
)


class Page(HTMLParser):
    """A page that is well formed, made of known tags, and asks nobody for anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.pictures: list[str] = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert TAGS.fullmatch(tag), tag
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "srcset", "data", "action", "xlink:href"), name
            if name == "href":
                assert value is not None and value.startswith("#") and value[1:] in SECTIONS
            if name == "style":
                assert value is not None and re.fullmatch(r"--width:\d+px|width:[\d.]+%", value)
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert not re.search(r"url\(|@import|expression|</", data)
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def check(text: str) -> Page:
    page = Page(text)
    assert tuple(page.ids) == SECTIONS
    assert (
        "default-src 'none'" in text
        and "<script" not in text
        and not re.search(r"(https?:)?//(?!www\.w3\.org/2000/svg)\w", text)
    )
    for picture in page.pictures:
        root = ET.fromstring(picture)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("viewBox")
    return page


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli.cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def plan_of(name: str) -> Plan:
    return make_plan(load_spec(find_spec(name)))


def compiled(entry: str = "mla_decode", **fields: Any) -> Compiled:
    made = Compiled(entry, 168, 0, 0, 0, 230_280, 95_824, {"HGMMA": 100}, False, 5.1)
    return replace(made, **fields)


def page_of(plan: Plan, **options: Any) -> str:
    return report_page(plan, [compiled()], {"nvrtc": "13.4"}, made_by="mlaforge", **options)


# ---- The page of a plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_spec_has_a_page(name: str) -> None:
    plan = plan_of(name)
    page = check(page_of(plan))
    kernels = [*(each.file for each in plan.decodes), *(each.file for each in plan.kernels)]
    assert all(file in page.text for file in kernels)
    assert f"{plan.decode.smem.total:,} of {plan.decode.smem.limit:,} B" in page.text
    for choice in plan.choices:
        assert choice.field in page.text and choice.why in page.text
    for barrier in (*plan.decode.mbarriers, *plan.decode.named_barriers):
        assert barrier.what in page.text
    # Shared memory and registers of each kernel that multiplies.
    multiply = len(plan.decodes) + sum(each.name == "prefill" for each in plan.kernels)
    assert len(page.pictures) == 2 * multiply
    assert "Not asked for." in page.text and "None given." in page.text


def test_the_same_gives_the_same() -> None:
    assert page_of(plan_of("deepseek_v3")) == page_of(plan_of("deepseek_v3"))


def test_what_is_bad_is_marked() -> None:
    plan = plan_of("minicpm3")
    good = check(page_of(plan))
    assert "register spills none" in good.text and "overlap" in good.text
    bad = report_page(
        plan, [compiled(spills=24, stack=8, serialized=True)], {}, made_by="mlaforge", no_timeline="No compiler."
    )
    page = check(bad)
    assert "register spills 24 B" in page.text and "serialised" in page.text and "No compiler." in page.text
    assert bad.count('class="bad"') + bad.count('class="n bad"') == 4


def test_verification_is_shown() -> None:
    rows = [Checked("decode", "causal", 3, "1 - cosine 2e-06", True), Checked("merge", "all", 2, "150%", False)]
    failed = Verification("under the simulator", rows, ["lse: 1 of 16\nreproduce: mlaforge verify a"])
    page = check(page_of(plan_of("minicpm3"), verification=failed))
    assert "verification failed" in page.text and "reproduce: mlaforge verify a" in page.text
    page = check(page_of(plan_of("minicpm3"), verification=replace(failed, rows=rows[:1], failures=[])))
    assert "verification accepted" in page.text and "causal 3 1 - cosine 2e-06 ok" in page.text


# ---- Names that mean harm --------------------------------------------------------------------------------------------


def result_tree() -> dict[str, Any]:
    path = max(RESULTS.glob("*_deepseek_v3/burst.json"))  # the newest
    tree: dict[str, Any] = json.loads(path.read_text())
    return tree


def hostile_tree() -> dict[str, Any]:
    """Put names that mean harm wherever a result has a name, and leave the numbers."""
    tree = result_tree()
    tree["made"] = tree["machine"]["gpu"] = tree["machine"]["driver"] = tree["machine"]["cuda"] = EVIL
    tree["peers"] = {EVIL + name: {**peer, "title": EVIL + peer["title"]} for name, peer in tree["peers"].items()}
    for entry in tree["burst"]:
        entry["suite"] = EVIL
        entry["kernels"] = {(n if n == "mlaforge" else EVIL + n): each for n, each in entry["kernels"].items()}
    tree["sustained"] = copy.deepcopy(tree["burst"])
    kernels = tree["burst"][0]["kernels"]
    tree["memory"] = [{"kernel": EVIL, "tokens": 3, "kernels": kernels}]
    tree["prefill"] = [{"b": 1, "s": 2, "h": 3, "kernels": kernels}]
    return tree


def test_names_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<" / 'x" onload="y'
    folder.mkdir(parents=True)
    (folder / "<b>.json").write_text(json.dumps(hostile_tree()))
    results = read_results(tmp_path, "deepseek_v3")
    verification = Verification(EVIL, [Checked(EVIL, EVIL, 1, EVIL, False)], [EVIL])
    text = report_page(
        plan_of("deepseek_v3"),
        [compiled(EVIL)],
        {EVIL: EVIL},
        made_by=EVIL,
        verification=verification,
        no_timeline=EVIL,
        results=results,
    )
    page = check(text)
    assert "<img" not in text
    assert page.text.count("<img src=x onerror=alert(1)>") > 20 and "{{ 7*7 }}" in page.text
    assert "<script>alert(1)</" in page.text


@given(words=st.text(max_size=40))
def test_pictures_are_xml_whatever_they_say(words: str) -> None:
    picture = Picture(100, words, 50)
    picture.text(1, 2, words)
    picture.shape("rect", "region", words, x=1, y=2, d=words)
    root = ET.fromstring(picture.markup())
    kept = re.sub("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", words)
    (text,) = root.iter("{http://www.w3.org/2000/svg}text")
    assert (text.text or "") == re.sub("\r\n?", "\n", kept)
    assert [child.tag.rpartition("}")[2] for child in root.iter()] == ["svg", "text", "rect"] + ["title"] * bool(words)


def test_a_picture_of_a_file_keeps_its_style_to_itself() -> None:
    timeline = trace.Timeline(EVIL.replace("\x00", "").replace("\x1b", ""), 10, (), ())
    text = str(embed(trace.to_svg(timeline), "timeline"))
    root = ET.fromstring(text)
    (style,) = root.iter("{http://www.w3.org/2000/svg}style")
    rules = re.findall(r"([^{}]+)\{", style.text or "")
    assert rules and all(part.startswith(".timeline ") for rule in rules for part in rule.split(","))
    assert 'fill="#ffffff"/>' not in text.partition("</style>")[2].partition("<text")[0]
    check(page_of(plan_of("minicpm3"), timeline=trace.to_svg(timeline)))


# ---- Benches ---------------------------------------------------------------------------------------------------------


def test_results_are_found_and_told_apart(tmp_path: Path) -> None:
    results = read_results(RESULTS, "deepseek_v3")
    assert {Path(name).name for name in results} >= {"burst.json", "few_heads.json", "small.json", "sustained.json"}
    assert all(result.spec.name == "deepseek_v3" for result in results.values())
    with pytest.raises(ResultsError, match="no results of kimi_k3; there are some of deepseek_v3"):
        read_results(RESULTS, "kimi_k3")
    with pytest.raises(ResultsError, match="`mlaforge bench` writes them"):
        read_results(tmp_path, "deepseek_v3")
    with pytest.raises(ResultsError, match="no such folder"):
        read_results(tmp_path / "none", "deepseek_v3")
    # What is no result of a bench is left alone.
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ResultsError, match="writes them"):
        read_results(tmp_path, "deepseek_v3")


def put(tree: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    node: Any = tree
    for name in parents:
        node = node[int(name) if isinstance(node, list) else name]
    node[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("burst.0.b", -1),
        ("burst.0.b", "x"),
        ("burst.0.kernels", []),
        ("burst.0.kernels.mlaforge.TFLOPs", float("nan")),
        ("burst.0.kernels.mlaforge.GBps", float("inf")),
        ("burst.0.kernels.mlaforge.us", {"median": 0}),
        ("spec", "deepseek_v3"),
        ("machine", {"gpu": ["a"]}),
        ("peers", {"a": {}}),
    ],
)
def test_a_result_that_is_wrong_is_told(tmp_path: Path, path: str, value: object) -> None:
    tree = result_tree()
    put(tree, path, value)
    (tmp_path / "burst.json").write_text(json.dumps(tree))
    with pytest.raises(ResultsError, match=re.escape(str(tmp_path / "burst.json"))) as error:
        read_results(tmp_path, "deepseek_v3")
    assert path.split(".")[0] in str(error.value)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"format": 1e', "\udcff"])
def test_what_is_no_json_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ResultsError, match="can't be read"):
        read_results(tmp_path, "deepseek_v3")


def named(picture: str, classes: str) -> list[ET.Element]:
    return [each for each in ET.fromstring(picture).iter() if re.fullmatch(classes, each.get("class", ""))]


def test_a_dot_for_each_that_was_timed() -> None:
    result = BenchResult.model_validate(result_tree())
    (plot,) = plots(result)
    timed = [each.us for entry in result.burst for each in entry.kernels.values() if each.us]
    dots = named(plot.picture, r"dot c\d")
    kernels = {name for entry in result.burst for name, each in entry.kernels.items() if each.us}
    assert len(dots) == len(timed) + len(kernels)  # and the legend
    # Further to the right is slower.
    for entry in result.burst:
        ours = entry.kernels["mlaforge"].us
        assert ours is not None
        places = []
        for name, each in entry.kernels.items():
            if name == "mlaforge" or not each.us or each.us / ours > 1.9:
                continue
            hover = f"{result.peers[name].title}: {each.us:.1f} us, {each.us / ours:.2f} of ours"
            (dot,) = [each for each in dots if hover in [title.text for title in each]][:1]
            places.append((each.us, float(dot.get("cx", ""))))
        places.sort()
        assert all(left[1] <= right[1] for left, right in pairwise(places))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/sustained.json")), ids=lambda path: path.parent.name)
def test_bars_are_as_long_as_rates(path: Path) -> None:
    result = BenchResult.model_validate_json(path.read_text())
    (plot,) = plots(result)
    bars = [float(each.get("width", "")) for each in named(plot.picture, r"region c\d")]
    rates = [
        each.tflops
        for entry in result.sustained
        for _, each in sorted(entry.kernels.items(), key=lambda item: item[0] != "mlaforge")
        if each.tflops
    ]
    assert len(bars) == len(rates)
    assert all(abs(bar / bars[0] - rate / rates[0]) < 0.01 for bar, rate in zip(bars, rates, strict=True))


# ---- Pictures of a plan ----------------------------------------------------------------------------------------------


@given(
    wanted=st.lists(st.floats(0, 400), min_size=1, max_size=20).map(sorted),
    gap=st.sampled_from([5.0, 17.0, 20.0]),
)
def test_labels_keep_apart(wanted: list[float], gap: float) -> None:
    places = spread(wanted, gap, 0, 420)
    assert all(below - above > gap - 1e-6 for above, below in pairwise(places))
    assert places[-1] <= 420 and places[0] >= -1e-6
    if all(below - above >= gap for above, below in pairwise(wanted)):
        assert places == pytest.approx(wanted)


@pytest.mark.parametrize("name", SHIPPED)
def test_shared_memory_is_drawn_to_scale(name: str) -> None:
    smem: SmemMap = plan_of(name).decode.smem
    picture = smem_picture(smem, "shared memory")
    drawn = named(picture, r"region c\d")
    own = sorted((each for each in smem.regions if each.alias_of is None), key=lambda each: each.offset)
    assert len(drawn) == sum(region.count for region in own)
    height = float(named(picture, "ground")[0].get("height", ""))
    first = drawn[0]
    assert float(first.get("height", "")) == pytest.approx(own[0].size / own[0].count * height / smem.limit, rel=0.01)
    words = "".join(ET.fromstring(picture).itertext())
    for region in smem.regions:
        assert region.name in words and f"{region.size:,} B" in words


# ---- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do without the compiler: what it says is not what these tests are of."""
    monkeypatch.setattr(cli.report, "compile_folders", lambda folders: [(read_manifest(folders[0]), NOTHING)])


NOTHING = CompiledKernel(Path("decode.cu"), "sm_90a", "", b"", {}, "", {}, {}, True)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "tour.yaml"
    path.write_text(SMALL)
    return path


def test_report(small: Path, tmp_path: Path) -> None:
    tree = result_tree()
    tree["spec"]["name"] = "tour"
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "burst.json").write_text(json.dumps(tree))
    path = tmp_path / "out" / "tour.html"
    result = run("report", small, "-o", path, "--bench", tmp_path / "bench")
    assert result.exit_code == 0 and result.stderr == "" and result.stdout.startswith(f"{path}: ")
    text = path.read_text()
    page = check(text)
    # Shared memory, pipeline and registers of decode, two of prefill, the timeline, the bench.
    assert len(page.pictures) == 7
    assert "mla_decode" in page.text and "mla_merge" in page.text and "FlashMLA" in page.text
    assert "tour, decode.cu, block (0, 0, 0)" in page.text and "name: tour" in page.text
    assert "cubin" in page.text and "NVRTC" in page.text

    data = json.loads(run("report", small, "-o", path, "--json").stdout)
    assert data["file"] == str(path) and data["verification"] is None and data["benches"] is None
    assert [each["file"] for each in data["kernels"]] == [
        *("decode.cu", "gather.cu", "append.cu", "merge.cu", "prefill.cu")
    ]
    assert data["timeline"]["kernel"] == "decode.cu" and data["timeline"]["why_none"] is None
    # Who does what, as decode_plain.cu.j2 has it.
    edges = {(each["role"], each["action"], each["mbarrier"]) for each in data["timeline"]["pipeline"]}
    left, right, producer = "warpgroup 0", "warpgroup 1", "producer"
    assert edges == {
        (producer, "waits", "empty"),
        (producer, "waits", "q_empty"),
        (producer, "copies", "full"),
        (producer, "copies", "q_full"),
        (left, "waits", "full"),
        (left, "waits", "q_full"),
        (left, "waits", "drained"),
        (left, "arrives", "empty"),
        (left, "arrives", "q_empty"),
        (left, "arrives", "filled"),
        (right, "waits", "full"),
        (right, "waits", "filled"),
        (right, "arrives", "empty"),
        (right, "arrives", "drained"),
    }
    plan = make_plan(parse_spec(SMALL))
    drawn = page_of(plan, traced="decode.cu", edges=sorted(Edge(*edge) for edge in edges))
    (pipeline,) = [picture for picture in check(drawn).pictures if "pipeline" in picture[:300]]
    assert len(named(pipeline, r"edge c\d \w+")) == len(edges) and len(named(pipeline, "pill")) == 6


@pytest.mark.usefixtures("compiled_once")
def test_no_timeline(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tour.html"
    assert run("report", small, "-o", path, "--no-timeline").exit_code == 0
    assert "Left out by --no-timeline." in check(path.read_text()).text

    def missing(*_: object) -> None:
        raise CompilerMissingError("install g++")

    monkeypatch.setattr("mlaforge.trace.trace_decode", missing)
    assert run("report", small, "-o", path).exit_code == 0
    assert "the simulator can't run here. install g++" in check(path.read_text()).text


@pytest.mark.usefixtures("compiled_once")
def test_a_timeline_that_ends_in_a_fault(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = trace.Timeline("small", 10, (), (), fault="a race <here>")
    monkeypatch.setattr("mlaforge.trace.trace_decode", lambda *_: timeline)
    path = tmp_path / "tour.html"
    result = run("report", small, "-o", path)
    assert result.exit_code == 1 and "a race <here>" in result.stderr
    assert "The run failed: a race <here>" in check(path.read_text()).text


@pytest.mark.usefixtures("compiled_once")
def test_verify_in_a_report(on_cpu: Decoders, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_report: Callable[..., Any] = cli.report.Run
    monkeypatch.setattr(
        cli.report,
        "Run",
        lambda seed, examples, device, results: of_report(
            seed, examples, 100, device="cpu", kernels=("decode", "merge"), results=results
        ),
    )
    path = tmp_path / "tour.html"
    arguments = ("report", small, "-o", path, "--no-timeline", "--verify", "--examples", "3")
    assert run(*arguments).exit_code == 0
    page = check(path.read_text())
    assert "verification accepted" in page.text and "naive and absorbed scores" in page.text
    on_cpu.fault = "base-2 lse"
    result = run(*arguments, "--examples", "20")
    assert result.exit_code == 1 and "failed" in result.stderr
    page = check(path.read_text())
    assert "verification failed" in page.text and "reproduce: mlaforge verify tour" in page.text


@pytest.mark.usefixtures("compiled_once")
def test_without_a_compiler_nothing_is_verified(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CompilerMissingError("install g++")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("mlaforge.simulator.find_compiler", missing)
    for arguments in (("report", small, "-o", tmp_path / "a.html", "--verify"), ("make", small, "-o", tmp_path)):
        monkeypatch.setattr(cli.make, "compile_folders", lambda folders: [])
        monkeypatch.setattr(cli.make, "compile_tables", lambda compiled: [])
        result = run(*arguments)
        assert result.exit_code == 3 and result.stderr == "install g++\n"
    assert not (tmp_path / "a.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--bench", "none"), "no such folder"),
        (("-o", "{file}/page.html"), "can't be written"),
        (("-o", "{folder}"), "is a directory"),
    ],
)
def test_what_is_wrong_is_told_at_once(small: Path, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "file").write_text("")
    named = [each.format(file=tmp_path / "file", folder=tmp_path) for each in arguments]
    result = run("report", small, *named)
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""
