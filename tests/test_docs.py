"""The documents are true: every block of code is run, every link leads somewhere, and the reference is the schema's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import mlaforge
from documents import DOCUMENTS, ROOT, Block, Reader, in_order, read_blocks
from mlaforge_generator import cli
from mlaforge_generator.errors import SpecError
from mlaforge_generator.spec_reference import reference_text

NOT_RUN = {
    ("README.md", "pip install . && mlaforge make deepseek_v3", "installs; .ci/run does the same"),
    ("README.md", "pip install '.[test]' && python -m pytest -n 2", "installs; .ci/run does the same"),
    ("README.md", "import torch", "in tests/test_attention.py"),
    ("README.md", "import torch", "in tests/test_flash_mla.py"),
    (
        "README.md",
        "vllm serve deepseek-ai/DeepSeek-V2-Lite --trust-remote-code --attention-backend CUSTOM \\",
        "needs vLLM and a Hopper GPU",
    ),
    (
        "README.md",
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V2-Lite --trust-remote-code --page-size 64 "
        "\\",
        "needs SGLang and a Hopper GPU",
    ),
    (
        "README.md",
        "set(MLAFORGE_CUTLASS_INCLUDE_DIR /path/to/cutlass/include)",
        "part of a C++ project; tests/test_export.py builds one",
    ),
    (
        "README.md",
        "mlaforge tune mymodel.yaml --shapes 64x8192,1x65536 --budget 120 -o mymodel.tuned.yaml",
        "needs a Hopper GPU",
    ),
    (
        "README.md",
        "specs/x.yaml -> Spec -> Plan -> generated/x/{decode.cu, prefill.cu, ..., *.cuh, manifest.json} -> NVRTC -> "
        "cubin -> launch",
        "a picture",
    ),
    ("README.md", "mlaforge bench deepseek_v3 --suite burst --budget 45", "needs a Hopper GPU"),
    (
        "README.md",
        "MLAFORGE_GPU_MATRIX=reduced compute-sanitizer --tool racecheck --report-api-errors no "
        "--target-processes all \\",
        "needs a Hopper GPU",
    ),
    (
        "docs/numerics.md",
        "out = softmax(softmax_scale * q K^T) V        lse = ln sum exp(softmax_scale * q K^T)",
        "a formula",
    ),
    ("docs/numerics.md", "lse = log2 sum_k 2^lse_k        out = sum_k 2^(lse_k - lse) out_k", "a formula"),
    ("docs/tour.md", "spec.yaml -> Spec -> Plan -> decode.cu + manifest.json -> cubin -> launch", "a picture"),
}
"""Blocks that no test here runs, and why: document, first line, reason. A new one is to be a decision."""


def test_what_is_not_run() -> None:
    blocks = [block for path in DOCUMENTS for block in read_blocks(path) if block.not_run]
    assert {(block.document, block.head, block.not_run) for block in blocks} == NOT_RUN
    assert len(blocks) == len(NOT_RUN)


def test_there_are_documents() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS}
    assert names == {
        "README.md",
        *(f"docs/{name}.md" for name in ("README", "numerics", "schedules", "simulator", "spec", "tour")),
    }
    readme = (ROOT / "README.md").read_text()
    assert all(f"({name})" in readme for name in names if name not in ("README.md", "docs/README.md"))


# ---- Running them ----------------------------------------------------------------------------------------------------


def of_readme(folder: Path) -> dict[str, Any]:
    """Give what the README's first examples leave to the reader: tensors, in sizes for the simulator."""
    config = {
        "model_type": "deepseek_v3",
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).bfloat16()

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return {
        "q": random(1, 2, 8, 576),
        "kv_cache": random(4, 64, 576),
        "block_table": ints(2, 0).view(1, 2),
        "cache_seqlens": ints(90),
    }


PREPARE = {
    # What a block of the README needs, by what it calls; the names of the blocks before it are there.
    "mla.prefill": """
q, k, v = (torch.randn(70, 2, n).bfloat16() for n in (192, 192, 128))
cu_seqlens_q = cu_seqlens_k = torch.tensor([0, 30, 70], dtype=torch.int32)
""",
    "mla.chunked_prefill": """
q, latent = torch.randn(5, 2, 192).bfloat16(), torch.randn(5, 576).bfloat16()
kv_b = torch.randn(2, 256, 512).bfloat16()
cu_seqlens_q, context_lens = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
longest = all_tokens = 40
""",
    "mla.append": """
n = 3
c_kv, k_rope = torch.randn(n, 512).bfloat16(), torch.randn(n, 64).bfloat16()
slot_mapping, positions = torch.tensor([5, -1, 70]), torch.arange(n)
weight, table = torch.ones(512).bfloat16(), torch.randn(10, 64)
cu_seqlens, starts = torch.tensor([0, n], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
out1, out2 = torch.randn(2, 1, 4, 16, 512).bfloat16()
lse1, lse2 = torch.randn(2, 1, 16, 4)
""",
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(tmp_path)
    readme = path.name == "README.md" and path.parent == ROOT
    if readme:
        reader.names |= of_readme(tmp_path)
        load = mlaforge.load
        monkeypatch.setattr(mlaforge, "load", lambda spec: load(spec, device="sim"))
    if path.name == "schedules.md":
        reader.copy_checkout()
    for block in read_blocks(path):
        if block.not_run:
            continue
        if readme and block.language == "python":
            for call, code in PREPARE.items():
                if f"{call}(" in block.text:
                    exec(code, reader.names)
        reader.run(block)
    if readme:
        assert (tmp_path / "mymodel.yaml").is_file() and reader.names["latents"].shape == (3, 576)
        assert reader.names["out"].isfinite().all()


# ---- The runner itself -----------------------------------------------------------------------------------------------


def test_a_block_that_is_wrong_fails(tmp_path: Path) -> None:
    def block(language: str, text: str) -> Block:
        return Block("a.md", 1, language, text)

    reader = Reader(tmp_path)
    reader.run(block("python", "x = 1\n"))
    reader.run(block("python", "assert x == 1\n"))
    reader.run(block("sh", "echo one; echo 'two   words'; echo three"))
    reader.run(block("text", "one\n...\ntwo words\n"))
    wrong = [
        block("python", "assert x == 2\n"),
        block("sh", "false; true"),
        block("text", "two words\none\n"),
        block("yaml", "name: a\nmodel: {}\n"),
        block("cuda", "// generated/deepseek_v3/decode.cu\nconstexpr int kStages = 4;\n"),
        block("diff", "--- pyproject.toml\n-[project]\n+[projects]\n"),
        block("rust", "fn main() {}\n"),
        block("", "a\n"),
    ]
    for each in wrong:
        with pytest.raises((AssertionError, SpecError)):
            reader.run(each)
    reader.run(block("cuda", "// generated/deepseek_v3/decode.cu\nconstexpr int kStages = 3;\n"))


def test_lines_in_order() -> None:
    assert in_order("a b\nc\n", "x a   b\ny\nc") is None
    assert in_order("c\na b\n", "a b\nc") == "a b"
    assert in_order("a\na\n", "a") == "a"


def test_blocks_are_read(tmp_path: Path) -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert len(read_blocks(path)) * 2 == len(re.findall(r"^```", text, re.MULTILINE))


# ---- Links and the reference -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_reference_of_specs_is_the_schemas(tmp_path: Path) -> None:
    reference = ROOT / "docs" / "spec.md"
    assert reference.read_text(encoding="utf-8") == reference_text(), (
        "run: mlaforge schema --format markdown -o docs/spec.md"
    )
    check = ["schema", "--format", "markdown", "--check"]
    assert CliRunner().invoke(cli.cli, [*check, "-o", str(reference)]).exit_code == 0
    stale = tmp_path / "spec.md"
    stale.write_text(reference_text().replace("kv_lora_rank", "kv_rank"))
    failed = CliRunner().invoke(cli.cli, [*check, "-o", str(stale), "--json"])
    assert failed.exit_code == 1 and json.loads(failed.stdout)["up_to_date"] is False
    assert "mlaforge schema --format markdown -o" in failed.stderr
    assert CliRunner().invoke(cli.cli, check).exit_code == 2


def test_the_reference_has_every_field() -> None:
    schema = json.loads(CliRunner().invoke(cli.cli, ["schema"]).stdout)
    text = reference_text()
    for node in (schema, *schema["$defs"].values()):
        for name, field in node["properties"].items():
            assert f"| `{name}` |" in text and field["description"].replace("|", "\\|") in text


def test_commands_and_exit_codes_are_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, command in cli.cli.commands.items():
        assert f"`mlaforge {name}" in readme, name
        assert command.help
