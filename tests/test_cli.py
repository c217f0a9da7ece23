"""The command line: what it prints where, its exit codes, and what it must not import."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mlaforge
from mlaforge import toolchain
from mlaforge.manifest import read_manifest
from mlaforge_generator import cli
from mlaforge_generator.plan import make_plan
from mlaforge_generator.prefill_plan import PrefillPlan
from mlaforge_generator.resources import find_spec, spec_dir
from mlaforge_generator.schema import schema_text
from mlaforge_generator.spec import load_spec
from test_verify import Manifest, TorchDecoder
from test_verify import one_thread as one_thread

SHIPPED = sorted(path.stem for path in spec_dir().glob("*.yaml"))


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli.cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def bad_spec(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text("name: Bad\nmodel: {num_attention_heads: 0}\n")
    return path


def lines_of(result: Result) -> list[str]:
    return result.stderr.splitlines()


# ---- plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_plan_prints_every_number(name: str) -> None:
    result = run("plan", name)
    assert result.exit_code == 0 and result.stderr == ""
    plan = make_plan(load_spec(find_spec(name)))
    decode = plan.decode
    for region in decode.smem.regions:
        assert re.search(rf"^\s*{region.offset:,}\s+{region.size:,}\s+{region.name}\s", result.stdout, re.MULTILINE)
    assert f"{decode.smem.total:,} of {decode.smem.limit:,} B" in result.stdout
    for name, what in [(each.name, each.what) for each in decode.mbarriers] + [(r.name, r.what) for r in decode.roles]:
        assert f" {name} " in result.stdout and what in result.stdout
    for barrier in decode.named_barriers:
        assert barrier.constant in result.stdout
    for choice in plan.choices:
        assert choice.field in result.stdout and choice.why in result.stdout
    prefill = plan.kernels[-1]
    assert isinstance(prefill, PrefillPlan)
    for region in prefill.smem.regions:
        assert re.search(rf"^\s*{region.offset:,}\s+{region.size:,}\s+{region.name}\s", result.stdout, re.MULTILINE)
    for words in (
        "in the bytes of P",
        "Tensor maps",
        "Launch",
        "Split scheme",
        "Memory-bound kernels on copies",
        "Prefill calls on",
        "FLOP/B",
        "floor",
        "MHA",
        "GQA-8",
        "MLA",
    ):
        assert words in result.stdout, words
    assert "\x1b" not in result.stdout


def test_plan_as_json_is_for_programs() -> None:
    result = run("plan", "deepseek_v3", "--json", "--layers", "60")
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert data["decode"]["smem"]["total"] <= data["target"]["smem_per_block"] == 232_448
    sizes = data["cache_sizes"]
    assert (sizes["batch"], sizes["context"], sizes["layers"]) == (16, 65_536, 60)
    assert {kind["kind"]: kind["total"] for kind in sizes["kinds"]} == {
        "MHA": 4_123_168_604_160,
        "GQA-8": 257_698_037_760,
        "MLA": 72_477_573_120,
    }
    assert len(data["costs"]) > 1
    assert len(data["prefill_costs"]) > 1 and {cost["heads"] for cost in data["prefill_costs"]} == {128}
    for cost in (*data["costs"], *data["prefill_costs"]):
        assert cost["floor_us"] == max(cost["memory_us"], cost["compute_us"])


@pytest.mark.parametrize(
    ("dtype", "row_bytes", "fits"),
    [("fp8_e4m3", 576, 4_012_978), ("fp8_ds_mla", 656, 3_523_590), ("nvfp4", 416, 5_556_431)],
)
def test_plan_of_a_quantised_cache(dtype: str, row_bytes: int, fits: int) -> None:
    """What a token takes, and the context that fits."""
    name = f"deepseek_v3_{dtype}"
    text = run("plan", name).stdout
    for words in (f"{dtype} cache of {row_bytes} B a token", f"MLA, {dtype}", f"141 GB hold a context of {fits:,}"):
        assert words in text, words
    assert "widening of codes" in text
    data = json.loads(run("plan", name, "--json").stdout)
    sizes = data["cache_sizes"]
    assert (sizes["row_bytes"], sizes["memory"], sizes["context_that_fits"]) == (row_bytes, 141_000_000_000, fits)
    assert {cost["cache_bytes"] // (cost["batch"] * cost["context"]) for cost in data["costs"]} == {row_bytes}


def test_plan_at_a_given_shape() -> None:
    arguments = ("--batch", "3", "--context", "100", "--s-q", "2", "--heads", "7", "--layers", "5")
    data = json.loads(run("plan", "deepseek_v3", "--json", *arguments).stdout)
    (cost,) = data["costs"]
    assert (cost["batch"], cost["context"], cost["s_q"], cost["heads"]) == (3, 100, 2, 7)
    (cost,) = data["prefill_costs"]
    assert (cost["batch"], cost["tokens"], cost["heads"]) == (3, 100, 7)
    assert data["cache_sizes"]["kinds"][2]["total"] == 3 * 100 * 5 * 1152
    text = run("plan", "deepseek_v3", *arguments).stdout
    assert "3 x 100 tokens, 5 layers" in text and "1.728 MB" in text and "1.648 MiB" in text


def test_heads_are_those_of_a_rank_and_layers_those_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "name: a\ntensor_parallel: 8\nmodel: {num_attention_heads: 128, kv_lora_rank: 512, qk_nope_head_dim: 128,"
        " qk_rope_head_dim: 64, v_head_dim: 128, num_hidden_layers: 7}\n"
    )
    data = json.loads(run("plan", path, "--json").stdout)
    assert {cost["heads"] for cost in data["costs"]} == {16} and data["cache_sizes"]["layers"] == 7
    assert "each rank holds all of MLA's" in run("plan", path).stdout


@pytest.mark.parametrize("command", [["plan"], ["generate"], ["compile"], ["verify"], ["make"]])
def test_faults_of_a_spec_are_lines_on_stderr(command: list[str], bad_spec: Path, tmp_path: Path) -> None:
    result = run(*command, bad_spec)
    assert result.exit_code == 2 and result.stdout == ""
    assert lines_of(result)[0].startswith(f"{bad_spec}:1:7: name: must be")
    assert len(lines_of(result)) >= 3 and all(line.startswith(f"{bad_spec}:") for line in lines_of(result))
    missing = run(*command, tmp_path / "none.yaml")
    assert missing.exit_code == 2 and "no such file" in missing.stderr
    unknown = run(*command, "deepseek_v4")
    assert unknown.exit_code == 2 and "deepseek_v3" in unknown.stderr and len(lines_of(unknown)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "deepseek_v3", "--batch", "0"],
        ["plan", "deepseek_v3", "--wat"],
        ["nothing"],
        ["compile"],
        ["verify", "deepseek_v3", "--matrix", "--problem", "lengths=1"],
        ["verify", "deepseek_v3", "--problem", "lengths=x"],
        ["verify", "deepseek_v3", "--device", "tpu"],
        ["verify", "deepseek_v3", "--device", "cpu"],
    ],
    ids=" ".join,
)
def test_usage_errors(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.startswith("Usage:")


def test_help_documents_the_exit_codes() -> None:
    text = run("--help").stdout
    for code, words in enumerate(("well", "failed", "spec", "compile", "GPU")):
        assert re.search(rf"^\s*{code}  .*{words}", text, re.MULTILINE)
    for command in ("plan", "generate", "compile", "verify", "make", "tune", "schema"):
        assert run(command, "--help").exit_code == 0
    assert mlaforge.__version__ in run("--version").stdout


# ---- generate and schema ---------------------------------------------------------------------------------------------


def test_generate_check_and_drift(tmp_path: Path) -> None:
    out = tmp_path / "out"
    missing = run("generate", "deepseek_v3", "-o", out, "--check")
    assert missing.exit_code == 1 and "missing" in missing.stdout and not out.exists()
    assert run("generate", "deepseek_v3", "kimi_k3", "-o", out).exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == ["deepseek_v3", "kimi_k3"]
    again = run("generate", "deepseek_v3", "-o", out)
    assert again.exit_code == 0 and "up to date" in again.stdout
    assert run("generate", "deepseek_v3", "kimi_k3", "-o", out, "--check").exit_code == 0

    kernel = out / "deepseek_v3" / "decode.cu"
    text = kernel.read_text()
    kernel.write_text(text.replace("kStages = 3", "kStages = 4"))
    drift = run("generate", "deepseek_v3", "kimi_k3", "-o", out, "--check")
    assert drift.exit_code == 1 and "mlaforge generate" in drift.stderr
    assert re.search(r"^-constexpr int kStages = 4", drift.stdout, re.MULTILINE)
    assert re.search(r"^\+constexpr int kStages = 3", drift.stdout, re.MULTILINE)
    assert "kimi_k3" not in drift.stderr
    assert run("generate", "deepseek_v3", "-o", out).exit_code == 0 and kernel.read_text() == text


def test_generate_all_and_nothing_left_over(tmp_path: Path) -> None:
    assert run("generate", "-o", tmp_path).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == SHIPPED
    assert run("generate", "-o", tmp_path, "--check").exit_code == 0
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.json").write_text("{}")
    left = run("generate", "-o", tmp_path, "--check")
    assert left.exit_code == 1 and "old" in left.stdout
    # Where specs are named, other folders are none of our business.
    assert run("generate", "deepseek_v3", "-o", tmp_path, "--check").exit_code == 0


def test_two_specs_of_one_name(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text((spec_dir() / "deepseek_v3.yaml").read_text())
    result = run("generate", "deepseek_v3", other, "-o", tmp_path / "out")
    assert result.exit_code == 2 and "two specs" in result.stderr and not (tmp_path / "out").exists()


def test_faults_of_all_specs_at_once(bad_spec: Path, tmp_path: Path) -> None:
    worse = tmp_path / "worse.yaml"
    worse.write_text("[]\n")
    result = run("generate", bad_spec, "deepseek_v3", worse, "-o", tmp_path / "out")
    assert result.exit_code == 2 and str(bad_spec) in result.stderr and str(worse) in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_can_t_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("generate", "deepseek_v3", "-o", tmp_path / "file")
    assert result.exit_code == 2 and "can't be written" in result.stderr and len(lines_of(result)) == 1


def test_schema(tmp_path: Path) -> None:
    assert run("schema").stdout == schema_text()
    assert run("schema", "--check").exit_code == 0
    path = tmp_path / "schema.json"
    assert "missing" in run("schema", "--check", "-o", path).stderr
    assert run("schema", "-o", path).exit_code == 0 and path.read_text() == schema_text()
    path.write_text("{}")
    drift = run("schema", "--check", "-o", path)
    assert drift.exit_code == 1 and "differs" in drift.stderr


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [["plan", "deepseek_v3"], ["plan", "deepseek_v3", "--json"], ["generate", "--check"], ["schema", "--check"]],
)
def test_neither_torch_nor_cuda_is_imported(arguments: list[str]) -> None:
    result = python(
        "import sys; from mlaforge_generator.cli import cli\n"
        f"try: cli({arguments!r})\n"
        "except SystemExit: pass\n"
        "wrong = [name for name in sys.modules if name.partition('.')[0] in ('torch', 'cuda', 'numpy')]\n"
        "sys.exit(str(wrong) if wrong else 0)"
    )
    assert result.returncode == 0, result.stderr


def test_compile_does_without_torch() -> None:
    result = python(
        "import sys; sys.modules['torch'] = None\n"
        "from mlaforge_generator.cli import main\n"
        "sys.argv = ['mlaforge', 'compile', 'minicpm3', '--json']; main()"
    )
    assert result.returncode == 0 and json.loads(result.stdout), result.stderr


# ---- compile ---------------------------------------------------------------------------------------------------------


def test_compile_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(tmp_path / "empty"))
    run("generate", "minicpm3", "-o", tmp_path)
    result = run("compile", "deepseek_v3", tmp_path / "minicpm3", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    reports: list[dict[str, Any]] = json.loads(result.stdout)
    plan, narrower = (make_plan(load_spec(find_spec(name))) for name in ("deepseek_v3", "minicpm3"))
    files = {
        each.spec.name: [kernel.file for kernel in (each.decode, *each.narrow_decodes, *each.kernels)]
        for each in (plan, narrower)
    }
    assert [(report["spec"], report["file"]) for report in reports] == [
        (name, file) for name, of_spec in files.items() for file in of_spec
    ]
    decodes = (plan.decode, *plan.narrow_decodes)
    sizes = [*(each.smem.total for each in decodes), *(kernel.smem_bytes for kernel in plan.kernels)]
    assert [report["dynamic_smem"] for report in reports[: len(sizes)]] == sizes
    for report in reports:
        (kernel,) = report["kernels"]
        assert kernel["spill_stores"] == kernel["spill_loads"] == kernel["stack_frame"] == 0
        assert not kernel["serialized"] and 0 < kernel["registers"] <= 255
        assert report["dynamic_smem"] + kernel["static_smem"] <= report["smem_limit"]
        assert {"nvrtc", "key", "cache"} <= set(report["seconds"])
        multiplies = report["file"].startswith(("decode", "prefill"))
        assert (kernel["sass"].get("HGMMA", 0) > 0) == (kernel["sass"].get("UTMALDG", 0) > 0) == multiplies
    warm = json.loads(run("compile", "deepseek_v3", "--json").stdout)
    assert all(report["cache_hit"] for report in warm)
    assert [report["key"] for report in warm] == [report["key"] for report in reports[: len(sizes)]]
    text = run("compile", "deepseek_v3").stdout
    for words in (
        "mla_decode",
        *(kernel.entry for kernel in plan.kernels),
        f"{plan.decode.smem.total:,}",
        "HGMMA",
        "UTMALDG",
        "spills",
        "cache",
    ):
        assert words in text


def test_compile_errors_carry_the_log(tmp_path: Path) -> None:
    run("generate", "deepseek_v3", "-o", tmp_path)
    kernel = tmp_path / "deepseek_v3" / "decode.cu"
    kernel.write_text(kernel.read_text().replace("ring.advance();", "ring.advances();"))
    result = run("compile", tmp_path / "deepseek_v3")
    assert result.exit_code == 3 and result.stdout == ""
    assert "advances" in result.stderr and re.search(r"decode\.cu\(\d+\): error", result.stderr)


def test_a_folder_that_is_none_of_ours(tmp_path: Path) -> None:
    result = run("compile", tmp_path)
    assert result.exit_code == 2 and "manifest.json" in result.stderr
    run("generate", "deepseek_v3", "-o", tmp_path)
    (tmp_path / "deepseek_v3" / "decode.cu").unlink()
    result = run("compile", tmp_path / "deepseek_v3")
    assert result.exit_code == 2 and "decode.cu" in result.stderr and len(lines_of(result)) == 1


OF_FOLDERS = (["compile"], ["verify"], ["verify", "--device", "sim"], ["trace"], ["bench"])


@pytest.mark.parametrize("command", OF_FOLDERS, ids=" ".join)
@pytest.mark.parametrize("wrong", ["empty", "no JSON", "no dimension", "a file less", "a link that leads nowhere"])
def test_a_folder_with_faults_is_told_by_every_command(command: list[str], wrong: str, tmp_path: Path) -> None:
    """Before a missing GPU, too."""
    folder = tmp_path / "minicpm3"
    folder.mkdir()
    if wrong != "empty":
        run("generate", "minicpm3", "-o", tmp_path)
    manifest, source = folder / "manifest.json", folder / "gather.cu"
    if wrong == "no JSON":
        manifest.write_text("{")
    elif wrong == "no dimension":
        manifest.write_text(manifest.read_text().replace('"v_head_dim"', '"v_head"'))
    elif wrong != "empty":
        source.unlink()
        if wrong != "a file less":
            source.symlink_to("none.cu")
    result = run(*command, folder)
    assert result.exit_code == 2 and result.stdout == "" and len(lines_of(result)) == 1
    name = "gather.cu" if source.is_symlink() or wrong == "a file less" else "manifest.json"
    assert str(folder) in result.stderr and name in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "NAME"],
        ["make", "NAME"],
        ["generate", "NAME"],
        ["compile", "NAME"],
        ["verify", "NAME"],
        ["trace", "NAME"],
        ["bench", "NAME"],
        ["tune", "NAME"],
        ["tune", "NAME", "--threshold"],
        ["report", "NAME"],
        ["report", "minicpm3", "--bench", "NAME"],
        ["export", "NAME", "--format", "cmake", "-o", "x"],
        ["import", "NAME"],
        ["generate", "minicpm3", "-o", "NAME"],
        ["export", "minicpm3", "--format", "cmake", "-o", "NAME"],
        ["schema", "-o", "NAME"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["x" * 300, "file/x", "loop"])
def test_names_of_no_file(command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line says so, whatever makes the name impossible."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    result = run(*(name if word == "NAME" else word for word in command))
    assert result.exit_code == 2 and result.stdout == "" and name[-200:] in result.stderr
    assert sorted(os.listdir()) == ["file", "loop"]


def test_what_generate_and_schema_can_not_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there or is no text has drifted; what can't be read is told."""
    run("generate", "minicpm3", "-o", tmp_path)
    path = tmp_path / "minicpm3" / "decode.cu"
    text = path.read_bytes()
    for damaged in (b"\xff\x00" + text, text.replace(b"\n", b"\r\n")):
        path.write_bytes(damaged)
        result = run("generate", "minicpm3", "-o", tmp_path, "--check")
        assert result.exit_code == 1 and "decode.cu" in result.stdout and "not what the specs give" in result.stderr
    assert run("generate", "minicpm3", "-o", "x" * 300, "--check").exit_code == 1
    assert run("schema", "-o", "x" * 300, "--check").exit_code == 1
    read = Path.read_bytes

    def refuse(self: Path) -> bytes:
        if self.is_relative_to(tmp_path):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return read(self)

    (tmp_path / "schema.json").touch()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    for command in (["generate", "minicpm3", "-o", tmp_path], ["schema", "-o", tmp_path / "schema.json"]):
        result = run(*command, "--check")
        assert result.exit_code == 2 and len(lines_of(result)) == 1
        assert "can't be read: Permission denied" in result.stderr


def test_a_missing_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise toolchain.ToolchainError("CUTLASS headers not found; run: pip install nvidia-cutlass")

    monkeypatch.setattr("mlaforge.compiler.find_toolchain", missing)
    result = run("compile", "deepseek_v3")
    assert result.exit_code == 3 and result.stderr == "CUTLASS headers not found; run: pip install nvidia-cutlass\n"


# ---- verify and make -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


class Decoders:
    """Stands in for `mlaforge.load`: a decoder in torch, of the folder's shape, with a fault if one is set."""

    fault = ""

    def load(self, folder: Path, **_: object) -> TorchDecoder:
        manifest = read_manifest(folder)
        cache = manifest.cache
        return TorchDecoder(self.fault, Manifest(manifest.d_qk, manifest.d_v, manifest.softmax_scale, cache))  # type: ignore[arg-type]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Decoders:
    """Let verification run on the CPU, with decoders in torch."""
    decoders = Decoders()
    monkeypatch.setattr("mlaforge_generator.cli.devices.why_no_hopper", lambda device: None)
    monkeypatch.setitem(mlaforge.__dict__, "load", decoders.load)
    return decoders


def test_verify_needs_a_gpu(no_gpu: None) -> None:
    result = run("verify", "deepseek_v3")
    assert result.exit_code == 4 and result.stdout == ""
    assert result.stderr == (
        "no CUDA GPU found; the kernels can't run here, but `--device sim` runs their text on the CPU\n"
    )


def test_verify_needs_torch_under_the_simulator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported with a sign of life, for it takes seconds."""
    shown: list[str] = []

    @contextlib.contextmanager
    def status(what: str) -> Iterator[None]:
        shown.append(what)
        yield

    monkeypatch.setattr("mlaforge_generator.cli.devices.status", status)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("verify", "minicpm3", "--device", "sim")
    assert result.exit_code == 3 and "torch can't be imported" in result.stderr and shown == ["importing torch"]


def test_verify_needs_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    result = run("verify", "deepseek_v3")
    assert result.exit_code == 4 and "A100" in result.stderr and "8.0" in result.stderr
    assert "cuda:1" in run("verify", "deepseek_v3", "--device", "cuda:1").stderr


def test_verify_accepts(on_cpu: Decoders, tmp_path: Path) -> None:
    result = run("verify", "minicpm3", "--device", "cpu", "--examples", "6", "--max-tokens", "300", "-v")
    assert result.exit_code == 0, result.stdout
    assert "absorption: " in result.stdout and "all 6 problems accepted" in result.stdout
    assert "of tolerance" in result.stdout and "1 - cos" in result.stdout
    assert len(lines_of(result)) == 6 and all("lengths=" in line for line in lines_of(result))
    run("generate", "minicpm3", "-o", tmp_path)
    folder = run("verify", tmp_path / "minicpm3", "--device", "cpu", "--problem", "lengths=5 s_q=2 causal=1")
    assert folder.exit_code == 0 and "all 1 problems accepted" in folder.stdout and folder.stderr == ""


def test_verify_runs_the_matrix(on_cpu: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlaforge.verify import Problem

    monkeypatch.setattr("mlaforge.verify.flashmla_matrix", lambda: iter([Problem((3,)), Problem((4,))]))
    assert "all 2 problems" in run("verify", "minicpm3", "--device", "cpu", "--matrix").stdout


def test_verify_fails_with_a_line_that_replays(on_cpu: Decoders) -> None:
    on_cpu.fault = "base-2 lse"
    result = run("verify", "minicpm3", "--device", "cpu", "--examples", "20", "--max-tokens", "300")
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("reproduce: ")]
    words = shlex.split(line.removeprefix("reproduce: "))
    assert words[:3] == ["mlaforge", "verify", "minicpm3"] and "failed: lse" in result.stdout
    again = run(*words[1:], "--device", "cpu")
    assert again.exit_code == 1 and line in again.stdout
    on_cpu.fault = ""
    assert run(*words[1:], "--device", "cpu").exit_code == 0


def test_verify_compile_errors(on_cpu: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlaforge.compiler import CompileError

    def load(folder: Path, **_options: object) -> None:
        raise CompileError(folder / "decode.cu", "decode.cu(3): error: no")

    monkeypatch.setitem(mlaforge.__dict__, "load", load)
    result = run("verify", "minicpm3")
    assert result.exit_code == 3 and "decode.cu(3)" in result.stderr


def test_make_without_a_gpu(no_gpu: None, tmp_path: Path) -> None:
    result = run("make", "deepseek_v3", "-o", tmp_path, "--examples", "3")
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout.startswith("deepseek_v3: d_qk 576, d_v 512, 128 heads")
    assert (tmp_path / "deepseek_v3" / "manifest.json").is_file()
    assert "mla_decode" in result.stdout and "absorption: " in result.stdout
    assert "no CUDA GPU found: the kernels were compiled for it" in result.stdout
    assert "all 3 problems accepted" in result.stdout
    assert result.stdout.splitlines()[-1] == "prefill: all 3 problems accepted"


def test_verify_under_the_simulator() -> None:
    result = run("verify", "minicpm3", "--device", "sim", "--mode", "lazy", "--problem", "lengths=70 h_q=16")
    assert result.exit_code == 0 and "all 1 problems accepted" in result.stdout


def test_a_prefill_problem_begins_with_the_name(on_cpu: Decoders) -> None:
    for words in (("--problem", "prefill q=3 k=4"), ("--kernel", "prefill")):
        result = run("verify", "minicpm3", "--device", "cpu", *words)
        assert result.exit_code == 2 and "minicpm3: there is no prefill kernel" in result.stderr
    result = run("verify", "minicpm3", "--problem", "prefill q=3 k=4,5")
    assert result.exit_code == 2 and "as many lengths" in result.stderr
    result = run("trace", "minicpm3", "--problem", "prefill q=3 k=4")
    assert result.exit_code == 2 and "prefill" in result.stderr


def test_verify_of_prefill_under_the_simulator() -> None:
    result = run("verify", "minicpm3", "--device", "sim", "--kernel", "prefill", "--examples", "3", "-v")
    assert result.exit_code == 0 and result.stdout.splitlines()[-1] == "prefill: all 3 problems accepted"
    assert all(line.startswith("prefill q=") for line in lines_of(result)) and len(lines_of(result)) == 3
    again = run("verify", "minicpm3", "--device", "sim", "--problem", lines_of(result)[0])
    assert again.exit_code == 0 and again.stdout.splitlines()[-1] == "prefill: all 1 problems accepted"


def test_failure_under_the_simulator_replays_with_its_schedule(
    on_cpu: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu.fault = "base-2 lse"
    schedule = ("--device", "sim", "--mode", "lazy", "--schedule-seed", "7")
    result = run("verify", "minicpm3", *schedule, "--examples", "20", "--max-tokens", "300")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("reproduce: ")]
    assert line.endswith(" ".join(schedule))


def test_make_with_one(on_cpu: Decoders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of_make = cli.make.Run
    monkeypatch.setattr(
        cli.make,
        "Run",
        lambda seed, examples, device, results: of_make(seed, examples, 300, device="cpu", results=results),
    )
    result = run("make", "minicpm3", "-o", tmp_path, "--examples", "4")
    assert result.exit_code == 0 and "all 4 problems accepted" in result.stdout
    on_cpu.fault = "empty row not zero"
    assert run("make", "minicpm3", "-o", tmp_path, "--examples", "30").exit_code == 1


def test_make_fails_where_absorption_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mlaforge.reference import AbsorptionCheck

    monkeypatch.setattr("mlaforge.reference.check_absorption", lambda dims: AbsorptionCheck(1.0, 0.999))
    result = run("make", "minicpm3", "-o", tmp_path)
    assert result.exit_code == 1 and "absorption" in result.stderr
