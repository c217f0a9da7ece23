"""Specs and manifests from anywhere: no path of theirs leaves its folder, no text of theirs becomes code."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mlaforge
import mlaforge_generator
from folders import plan_with
from mlaforge.manifest import Manifest, ManifestError, read_manifest
from mlaforge_generator import cli
from mlaforge_generator.errors import SpecError
from mlaforge_generator.exchange.c_header import write_header
from mlaforge_generator.exchange.cmake import write_cmake
from mlaforge_generator.exchange.plugin_json import write_plugin
from mlaforge_generator.plan import make_plan
from mlaforge_generator.render import render
from mlaforge_generator.resources import find_spec
from mlaforge_generator.spec import Spec, check_spec, load_spec, parse_spec

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "generated" / "minicpm3"
PACKAGES = [Path(mlaforge.__file__).parent, Path(mlaforge_generator.__file__).parent]

# ---- Manifests -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER, tmp_path / "kernels")
    return tmp_path / "kernels"


def change(folder: Path, path: tuple[str | int, ...], value: object) -> None:
    """Set one value of a folder's manifest."""
    data = json.loads((folder / "manifest.json").read_text())
    node = data
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(data))


FILES: list[tuple[str | int, ...]] = [("decode", "file"), ("narrow_decodes", 0, "file"), ("kernels", "gather", "file")]
ENTRIES: list[tuple[str | int, ...]] = [(*path[:-1], "entry") for path in FILES]
LEAVING = [
    "../decode.cu",
    "..",
    ".",
    "",
    "/etc/passwd",
    "/etc/x.cu",
    "sub/decode.cu",
    "sub\\decode.cu",
    "./decode.cu",
    "decode.cu/",
    "decode.cu\0",
    "decode.cu\n",
    "\ndecode.cu",
    "~/decode.cu",
    ".hidden.cu",
    "-o.cu",
    "decode.cuh",
    "manifest.json",
    'x"\n#include "/etc/passwd.cu',
    "décode.cu",
    "d\u202eecode.cu",
    "a" * 200 + ".cu",
    None,
    1,
    True,
    ["decode.cu"],
    {"decode.cu": 1},
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path[0]))
@pytest.mark.parametrize("name", LEAVING, ids=lambda name: repr(name)[:30])
def test_a_manifest_names_files_of_its_folder(folder: Path, path: tuple[str | int, ...], name: object) -> None:
    change(folder, path, name)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        read_manifest(folder)


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: str(path[0]))
@pytest.mark.parametrize(
    "entry",
    [
        "",
        "1a",
        "a b",
        "a)\nint x = (0",
        "a;",
        "a\\\n",
        "a\0",
        "a::b",
        "é",
        "a??/",
        "a/*",
        'a"',
        "a" * 200,
        None,
        1,
        ["a"],
    ],
    ids=lambda entry: repr(entry)[:20],
)
def test_an_entry_is_an_identifier(folder: Path, path: tuple[str | int, ...], entry: object) -> None:
    """The simulator writes it into a text that it compiles, and that then runs on this machine."""
    change(folder, path, entry)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("name",), "../up"),
        (("name",), "a\n"),
        (("target",), "sm_90a -I/etc"),
        (("target",), "compute_90a"),
        (("target",), None),
        (("decode",), None),
        (("decode", "parameters", 0, "name"), "a; b"),
        (("decode", "parameters", 0, "ctype"), "int*) { }"),
        (("decode", "threads"), "384; x"),
        (("decode", "threads"), 1e999),
        (("decode", "boxes"), {"q": ["x"]}),
        (("softmax_scale",), "nan"),
        (("softmax_scale",), 1e999),
        (("d_qk",), None),
        (("kernels",), []),
        (("model",), 3),
        (("model", "v_head_dim"), None),
        (("model", "v_head_dim"), "128"),
        (("model", "kv_lora_rank"), -512),
        (("model", "qk_rope_head_dim"), 1 << 40),
    ],
    ids=str,
)
def test_other_fields(folder: Path, path: tuple[str | int, ...], value: object) -> None:
    change(folder, path, value)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        read_manifest(folder)


def test_a_link_may_not_leave_the_folder(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.cu"
    outside.write_text("int x;")
    (folder / "decode.cu").unlink()
    for target in (outside, Path("../outside.cu"), Path("/etc/passwd"), tmp_path / "nothing.cu"):
        (folder / "decode.cu").symlink_to(target)
        with pytest.raises(ManifestError, match="leads out of its folder"):
            read_manifest(folder)
        (folder / "decode.cu").unlink()
    # By way of a folder inside that is a link itself.
    (folder / "inner").symlink_to(tmp_path)
    (folder / "decode.cu").symlink_to("inner/outside.cu")
    with pytest.raises(ManifestError, match="leads out of its folder"):
        read_manifest(folder)


def test_links_of_package_managers(folder: Path, tmp_path: Path) -> None:
    """A folder may be a link, or all its files may be, to one place."""
    (tmp_path / "link").symlink_to(folder)
    assert read_manifest(tmp_path / "link").decode.source == tmp_path / "link" / "decode.cu"
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert read_manifest(linked).decode.source.read_text() == (folder / "decode.cu").read_text()
    (folder / "same.cu").symlink_to("decode.cu")
    change(folder, FILES[0], "same.cu")
    assert read_manifest(folder).decode.source == folder / "same.cu"


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "large", "deep", "number", "bytes", "nan", "list"])
def test_what_is_no_manifest(folder: Path, kind: str) -> None:
    path = folder / "manifest.json"
    text = path.read_text()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        contents = {
            "large": text + " " * (2 << 20),
            "deep": "[" * 200_000,
            "number": "9" * 10_000,
            "bytes": "\udcff",
            "nan": text.replace('"tensor_parallel": 1', '"tensor_parallel": NaN'),
            "list": f"[{text}]",
        }[kind]
        assert contents != text
        path.write_bytes(contents.encode(errors="surrogateescape"))
    with pytest.raises(ManifestError):
        read_manifest(folder)


MANIFEST = json.loads((FOLDER / "manifest.json").read_text())


def leaves(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Give the paths of all values below a node, collections included."""
    for name, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, name)
        if isinstance(child, dict | list):
            yield from leaves(child, (*path, name))


PATHS = list(leaves(MANIFEST))
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x.cu", "/etc/x.cu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(path=st.sampled_from(PATHS), value=JUNK)
def test_any_change_of_a_manifest(
    tmp_path_factory: pytest.TempPathFactory, path: tuple[str | int, ...], value: Any
) -> None:
    """It is read, with all its files in its folder, or it is a ManifestError."""
    data = copy.deepcopy(MANIFEST)
    node = data
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    folder = tmp_path_factory.getbasetemp() / "changed"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(data))
    try:
        manifest = read_manifest(folder)
    except ManifestError:
        return
    assert isinstance(manifest, Manifest)
    for source in manifest.sources:
        assert source.parent == folder and re.fullmatch(r"\w[\w.-]*\.cu", source.name, re.ASCII)


# ---- Specs -----------------------------------------------------------------------------------------------------------

HOSTILE = [
    "x\n#error hostile",
    "x\r#error hostile",
    "x\r\nint hostile;",
    "x\v\fint hostile;",
    "x\\\nint hostile;",
    "x\\",
    "x\\ \n",
    "x*/ int hostile; /*",
    "*/",
    "/*",
    "x??/\nint hostile;",
    "x??/",
    'x"; int hostile; "',
    "x'; int hostile; '",
    "x\0int hostile;",
    "x\x85int hostile;",
    "x\u2028int hostile;",
    "x\u2029int hostile;",
    "x\u202etsoh",
    "x\u200b",
    "\uff58",
    "é",
    "\ud800",
    "\x7f",
    "\x1b[31m",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "${CMAKE_COMMAND}",
    "$(touch hostile)",
    "`touch hostile`",
    "..",
    "../hostile",
    "/hostile",
    "x/../../hostile",
    "C:hostile",
    "%s%n",
    "X",
    "x ",
    " x",
    "",
    "x" * 65,
    'R"(',
    "//",
    "#include </etc/passwd>",
    "\ufeffx",
]
names = (
    st.sampled_from(HOSTILE) | st.text(max_size=70) | st.text(st.sampled_from("ab\n\r\\*/?\"'\0 \u2028;#"), max_size=8)
)

TREE = load_spec(find_spec("minicpm3")).model_dump(exclude_none=True)
PLAIN = re.compile("[a-z][a-z0-9_]{0,63}")


@given(name=names)
def test_a_spec_has_a_plain_name_or_none(name: str) -> None:
    try:
        spec = check_spec({**TREE, "name": name})
    except SpecError as error:
        assert not PLAIN.fullmatch(name)
        # The message is a line, whatever it is about.
        assert all(character.isprintable() for character in str(error))
    else:
        assert PLAIN.fullmatch(name) and spec.name == name
    text = yaml.safe_dump({**TREE, "name": name}, allow_unicode=False) if name.isprintable() else None
    if text is not None and not PLAIN.fullmatch(name):
        with pytest.raises(SpecError):
            parse_spec(text)


def code(text: str) -> list[str]:
    """Give a text's lines without what follows `//` in them, as a compiler would if no line were another's."""
    return [line.partition("//")[0] for line in text.split("\n")]


PLAN = plan_with("minicpm3")
RENDERED = {file: text for file, text in render(PLAN).items() if file.endswith(".cu")}


def unchecked(name: str) -> Spec:
    """Make a spec whose name nobody looked at."""
    return load_spec(find_spec("minicpm3")).model_copy(update={"name": name})


@settings(max_examples=40)
@given(name=names)
@example(name="plain")
def test_no_name_reaches_a_kernel_as_code(name: str) -> None:
    """Even if none of the spec's checks were there."""
    try:
        files = render(make_plan(unchecked(name)))
    except ValueError:
        assert not PLAIN.fullmatch(name)
        return
    for file, text in RENDERED.items():
        assert code(files[file]) == code(text)
        # Nothing more that joins lines or ends a comment, and nothing that is not what it seems.
        for mark in ("\\", "??", "*/", "/*"):
            assert files[file].count(mark) == text.count(mark)
        assert files[file].isascii()


@pytest.mark.parametrize(
    "name", [name for name in HOSTILE if re.search(r"[\n\r\\\0\v\f\x85\u2028\u2029]|\*/|/\*|\?\?", name)]
)
def test_a_name_that_could_end_a_comment_is_not_rendered(name: str) -> None:
    with pytest.raises(ValueError, match="may not stand in a kernel's text"):
        render(make_plan(unchecked(name)))


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_written_of_a_hostile_spec(tmp_path: Path, name: str) -> None:
    """By no command, in any place."""
    spec = tmp_path / "in" / "spec.yaml"
    spec.parent.mkdir()
    spec.write_bytes(yaml.safe_dump({**TREE, "name": name}, allow_unicode=False).encode("utf-8", "surrogatepass"))
    out = tmp_path / "out" / "deep"
    for command in (
        ["generate", str(spec), "-o", str(out)],
        ["export", str(spec), "--format", "cmake", "-o", str(out)],
        ["plan", str(spec)],
    ):
        result = CliRunner().invoke(cli.cli, command)
        assert result.exit_code == 2 and result.stderr and not isinstance(result.exception, (ValueError, OSError))
        assert "\x1b" not in result.stderr and "\0" not in result.stderr
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["in", "in/spec.yaml"]


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch hostile']",
        "!!python/name:os.system",
        "!!python/object/new:os.system ['touch hostile']",
        "!!python/module:os",
        "!!binary aGk=",
        "&a [*a]",
    ],
)
@pytest.mark.parametrize("place", ["name: {}\n", "name: x\nmodel: {}\n", "{}\n", "{}: x\n"])
def test_yaml_makes_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError):
        parse_spec(place.format(text))
    assert list(tmp_path.iterdir()) == []


@given(value=st.text(max_size=20) | st.sampled_from(HOSTILE), path=st.sampled_from(list(leaves(TREE))))
def test_no_text_in_any_field_reaches_a_file(value: str, path: tuple[str | int, ...]) -> None:
    """Every field but the name is a number or one of some words: a text of somebody's own is a fault."""
    tree = copy.deepcopy(TREE)
    node: Any = tree
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    try:
        plan = make_plan(check_spec(tree))
    except SpecError:
        return
    assert PLAIN.fullmatch(value)
    written = {**write_cmake(plan), "header": write_header(plan), "plugin": write_plugin(plan)}
    for text in written.values():
        assert text.isascii() and "\0" not in text


# ---- Our own sources -------------------------------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "numpy.load",
    "np.load",
}
YAML_ALLOWED = {"SafeLoader", "CSafeLoader", "safe_load", "safe_dump", "compose"}
"""Beside events, nodes and errors, which hold no objects."""


def faults(text: str) -> list[str]:
    """Name what makes code or objects of data."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported = [*module, *(alias.name for alias in node.names)]
            found += [name for name in imported if name.partition(".")[0] in FORBIDDEN_MODULES]
            if module == ["yaml"]:
                found += [f"yaml.{alias.name}" for alias in node.names if not yaml_allowed(alias.name)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "yaml":
            if not yaml_allowed(node.attr):
                found.append(f"yaml.{node.attr}")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if name in FORBIDDEN_CALLS:
                safe = keywords.get("weights_only")
                if not (name == "torch.load" and isinstance(safe, ast.Constant) and safe.value is True):
                    found.append(name)
            if name == "yaml.compose" and ast.unparse(keywords.get("Loader", ast.Constant(None))) != "yaml.SafeLoader":
                found.append("yaml.compose without the safe loader")
            shell = keywords.get("shell")
            if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
                found.append(f"{name}(shell=...)")
    return found


def yaml_allowed(name: str) -> bool:
    return name in YAML_ALLOWED or name.endswith(("Event", "Node", "Error"))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing, marshal",
        "import yaml; yaml.load(x)",
        "import yaml; yaml.load(x, Loader=yaml.Loader)",
        "import yaml; yaml.load(x, yaml.UnsafeLoader)",
        "import yaml; yaml.full_load(x)",
        "import yaml; yaml.unsafe_load_all(x)",
        "import yaml; yaml.compose(x)",
        "import yaml; yaml.compose(x, Loader=yaml.Loader)",
        "from yaml import load",
        "from yaml import FullLoader",
        "eval(x)",
        "exec(x)",
        "import os; os.system(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_search_finds(text: str) -> None:
    assert faults(text)


def test_the_search_lets_through() -> None:
    text = (
        "import yaml, subprocess, re\nyaml.safe_dump(x)\nyaml.SafeLoader(x)\nyaml.compose(x, Loader=yaml.SafeLoader)\n"
    )
    assert faults(text + "re.compile(x)\nsubprocess.run(x)\ntorch.load(x, weights_only=True)\nmodel.eval()\n") == []


def test_no_source_of_ours_makes_objects_of_data() -> None:
    paths = [path for package in PACKAGES for path in package.rglob("*.py")]
    assert len(paths) > 60
    assert {str(path): found for path in paths if (found := faults(path.read_text(encoding="utf-8")))} == {}


def test_a_cached_entry_is_no_pickle() -> None:
    """The other file that is read back: JSON and bytes behind their lengths."""
    from mlaforge.cache import Entry

    key = "0" * 64
    whole = Entry({"a": 1}, b"cubin").to_bytes(key)
    meta_size, cubin_size = struct.unpack_from("<QQ", whole, 49)
    assert json.loads(whole[65 : 65 + meta_size]) == {"key": key, "meta": {"a": 1}} and cubin_size == 5
