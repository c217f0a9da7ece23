"""The YAML reader: what it accepts, what it refuses and where it says the fault is."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlaforge_generator.errors import Problem, SpecError
from mlaforge_generator.yaml_source import MAX_BYTES, MAX_DEPTH, MAX_NODES, dotted, parse_yaml, read_bytes, shown
from strategies import yaml_trees


def problems_of(text: str | bytes) -> list[str]:
    """Give the faults of a text as `line:column: field: message`, whether they stop the reader or not."""
    try:
        problems = parse_yaml(text, "f").problems
    except SpecError as error:
        problems = error.problems
    return [str(problem).removeprefix("f:") for problem in sorted(problems)]


def tree_of(text: str | bytes) -> dict[str, Any]:
    source = parse_yaml(text, "f")
    assert not source.problems
    return source.tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("FALSE", False),
        ("", None),
        ("~", None),
        ("null", None),
        ("0", 0),
        ("-17", -17),
        ("+5", 5),
        ("9" * 40, int("9" * 40)),
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("40.0", 40.0),
        ("1e999", math.inf),
        ("-.inf", -math.inf),
        ("no", "no"),
        ("On", "On"),
        ("y", "y"),
        ("0x10", "0x10"),
        ("0o17", "0o17"),
        ("010", "010"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("9" * 5000, "9" * 5000),
        (".", "."),
        ("e3", "e3"),
        ("TrUe", "TrUe"),
        ("'128'", "128"),
        ('"true"', "true"),
        ("[1, a, {b: 2.5}]", [1, "a", {"b": 2.5}]),
        ("|\n  x\n  y\n", "x\ny\n"),
    ],
)
def test_scalars_follow_the_yaml_1_2_core_schema(text: str, value: object) -> None:
    found = tree_of(f"a: {text}")["a"]
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_float() -> None:
    assert math.isnan(tree_of("a: .nan")["a"])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("no", "unquoted no is text in YAML 1.2; a boolean is true or false"),
        ("ON", "unquoted ON is text in YAML 1.2; a boolean is true or false"),
        ("0x1F", "integers are written in plain decimal: 31"),
        ("-0o17", "integers are written in plain decimal: -15"),
        ("0b101", "integers are written in plain decimal: 5"),
        ("1_000", "integers are written in plain decimal: 1000"),
        ("7,168", "integers are written in plain decimal: 7168"),
        ("0128", "a leading zero makes it text, because it may mean octal; write the number without it"),
        ("'128'", "remove the quotes"),
        ('"1e3"', "remove the quotes"),
        ("8" * 41, "a number of more than 40 digits is read as text"),
        ("hello", None),
        ("'no'", None),
        ("''", None),
        ("128", None),
        ("0x", None),
        ("1_", None),
    ],
)
def test_hints_tell_why_a_value_is_text(text: str, hint: str | None) -> None:
    assert parse_yaml(f"a: {text}").hints.get(("a",)) == hint


FAULTS: dict[str, tuple[str | bytes, list[str]]] = {
    "duplicate": (
        "a: 1\nb: 2\na: 3\n",
        ["3:1: a: written twice, at line 1 column 1 and line 3 column 1; remove one of the two"],
    ),
    "duplicate, nested": (
        "m:\n  x: 1\n  'x': 1\n",
        ["3:3: m.x: written twice, at line 2 column 3 and line 3 column 3; remove one of the two"],
    ),
    "tab indents": ("a:\n\tb: 1\n", ["2:1: a tab can't be used here; YAML is indented and separated with spaces"]),
    "anchor and alias": (
        "a: &x 1\nb: *x\n",
        [
            "1:4: a: anchors ('x') are not allowed; write each value out",
            "2:4: b: aliases ('x') are not allowed; write the value out",
        ],
    ),
    "alias as key": (
        "*x : 1",
        ["1:1: aliases ('x') are not allowed; write the value out"],
    ),
    "merge key": ("a:\n  <<: {b: 1}\n", ["2:3: a: merge keys (<<) are not allowed; write the fields out"]),
    "tag": ("a: !!int '3'", ["1:4: a: tags ('tag:yaml.org,2002:int') are not allowed; remove it"]),
    "non-specific tag": ("a: ! 3", ["1:4: a: tags ('!') are not allowed; remove it"]),
    "python tag": (
        "a: !!python/object/apply:os.system ['true']",
        ["1:4: a: tags ('tag:yaml.org,2002:python/object/apply:os.system') are not allowed; remove it"],
    ),
    "two documents": ("a: 1\n---\nb: 2\n", ["2:1: a second YAML document starts here; a file holds one spec"]),
    "directive": ("%YAML 1.1\n---\na: 1", ["1:1: directives (lines that start with %) are not allowed; remove them"]),
    "huge version": (
        "%YAML 1." + "1" * 5000 + "\n---\na: 1",
        ["1:9: not valid YAML: a number or an escaped character here is out of range"],
    ),
    "escape out of range": (
        'a: "\\UFFFFFFFF"',
        ["1:7: not valid YAML: a number or an escaped character here is out of range"],
    ),
    "surrogate": ('a: "\\ud800"', ["1:4: a: holds half of a surrogate pair, which is no character"]),
    "surrogate key": ('"\\udc00": 1', ["1:1: a key holds half of a surrogate pair, which is no character"]),
    "empty": ("", ["1:1: the file is empty; a spec needs at least name and model"]),
    "comments only": ("# hello\n\n", ["1:1: the file is empty; a spec needs at least name and model"]),
    "empty document": (
        "---\n",
        ["2:1: the top level must be a mapping with at least name and model; got nothing"],
    ),
    "list": ("- a: 1\n", ["1:1: the top level must be a mapping with at least name and model; got a list"]),
    "scalar": ("hello", ["1:1: the top level must be a mapping with at least name and model; got 'hello'"]),
    "integer key": ("m: {1: 2}", ["1:5: m: a key must be text; got 1, which is not unless quoted"]),
    "null key": ("m: {~: 2}", ["1:5: m: a key must be text; got null, which is not unless quoted"]),
    "boolean key": ("true: 2", ["1:1: a key must be text; got true, which is not unless quoted"]),
    "list key": ("? [a, b]\n: 2", ["1:3: a key must be plain text; got a list"]),
    "mapping key": ("m: {{a: 1}: 2}", ["1:5: m: a key must be plain text; got a mapping"]),
    "not UTF-8": (b"a: 1\nb: \xe4\n", ["2:4: not UTF-8: byte 0xe4; save the file as UTF-8"]),
    "UTF-16": ("a: 1".encode("utf-16-le"), ["1:2: character U+0000 is not allowed; remove it"]),
    "UTF-16 with mark": ("a: 1".encode("utf-16"), ["1:1: not UTF-8: byte 0xff; save the file as UTF-8"]),
    "NUL": ("a: 1\nb: x\0y\n", ["2:5: character U+0000 is not allowed; remove it"]),
    "NUL after a byte-order mark": ("\ufeffa: \0", ["1:4: character U+0000 is not allowed; remove it"]),
    "byte-order mark inside": ("a: 1\nb: \ufeff2\n", ["2:4: character U+FEFF is not allowed; remove it"]),
    "escape sequence": ("a: \x1b[31m", ["1:4: character U+001B is not allowed; remove it"]),
    "unclosed": (
        "a: {b: 1\n",
        ["2:1: not valid YAML: expected ',' or '}', but got '<stream end>' (while parsing a flow mapping)"],
    ),
    "syntax after a fault": (
        "a: &x 1\nb: ]\n",
        [
            "1:4: a: anchors ('x') are not allowed; write each value out",
            "2:4: not valid YAML: expected the node content, but found ']' (while parsing a block node)",
        ],
    ),
    "too deep": ("a: " + "[" * 40, [f"1:35: nested more than {MAX_DEPTH} deep; a spec needs 3 levels"]),
    "very deep": ("[" * 1_000_000, ["1:33: nested more than 32 deep; a spec needs 3 levels"]),
    "deep keys": ("? " * 500_000, ["1:65: nested more than 32 deep; a spec needs 3 levels"]),
    "too many": (
        "a: [" + "1," * MAX_NODES + "]",
        [f"1:{4 + 2 * (MAX_NODES - 3) + 1}: more than 10,000 keys and values; this is no spec"],
    ),
    "too long": (" " * (MAX_BYTES + 1), ["1:1: the file is 1,048,577 characters; a spec has at most 1,048,576 bytes"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_at_their_place(name: str) -> None:
    text, expected = FAULTS[name]
    assert problems_of(text) == expected


def test_a_billion_laughs_are_not_expanded() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
    assert len(problems_of("\n".join(lines))) == 40 + 2 * 39


def test_nesting_up_to_the_limit_is_read() -> None:
    tree = tree_of("a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))
    assert json.dumps(tree).count("[") == MAX_DEPTH - 1


def test_an_entry_with_a_problem_covers_what_it_holds() -> None:
    source = parse_yaml("a: {b: &x {c: 1}}\nd: 1")
    assert source.is_refused(("a", "b"))
    assert source.is_refused(("a", "b", "c"))
    assert not source.is_refused(("a",))
    assert not source.is_refused(("d",))


def test_byte_order_mark_and_crlf_are_read_and_do_not_shift_positions() -> None:
    source = parse_yaml(b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: \xc3\xa9\r\n", "f")
    assert source.tree == {"a": 1, "b": {"c": "é"}}
    assert source.origin.places[("a",)].value == (1, 4)
    assert source.origin.places[("b", "c")].value == (3, 6)


def test_problems_stand_at_values_and_fall_back_to_the_key_of_a_parent() -> None:
    origin = parse_yaml("# head\na:\n  b:   5\nd: {e: [1, 2]}\n", "f").origin
    assert origin.problem(("a", "b"), "m") == Problem("f", 3, 8, "a.b", "m")
    assert origin.problem(("a", "b"), "m", at_key=True) == Problem("f", 3, 3, "a.b", "m")
    assert origin.problem(("a",), "m") == Problem("f", 2, 1, "a", "m")
    assert origin.problem(("a", "x", "y"), "m") == Problem("f", 2, 1, "a.x.y", "m")
    assert origin.problem(("d", "e", 1), "m") == Problem("f", 4, 12, "d.e[1]", "m")
    assert origin.problem(("z",), "m") == Problem("f", 2, 1, "z", "m")


@given(yaml_trees(), st.sampled_from([None, 2]))
def test_json_reads_back_as_the_same_tree(tree: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(tree, ensure_ascii=False, indent=indent)
    assert repr(tree_of(text)) == repr(tree)


@given(yaml_trees())
def test_every_position_is_where_the_text_has_the_entry(tree: dict[str, Any]) -> None:
    text = json.dumps(tree, ensure_ascii=False, indent=2)
    lines = text.split("\n")
    for path, place in parse_yaml(text).origin.places.items():
        value: Any = tree
        for part in path:
            value = value[part]
        found = lines[place.value.line - 1][place.value.column - 1 :]
        if path and isinstance(path[-1], str):
            key = json.dumps(path[-1], ensure_ascii=False)
            assert lines[place.key.line - 1][place.key.column - 1 :].startswith(key)
        if not isinstance(value, dict | list):
            assert found.rstrip(",") == json.dumps(value, ensure_ascii=False)


@given(yaml_trees())
def test_what_pyyaml_writes_is_read_or_refused_but_never_crashes(tree: dict[str, Any]) -> None:
    text = yaml.safe_dump(tree)
    aliased = "*id" in text
    try:
        source = parse_yaml(text, "f")
    except SpecError as error:
        assert "not valid YAML" in str(error) or "a tab" in str(error)
    else:
        assert aliased or source.problems or list(source.tree) == sorted(tree)


_TOKENS = [
    *"{}[],:?-|>'\"\\#%@`!&*~\t \n\r\0",
    *[
        "- ",
        ": ",
        "a: ",
        "\n  ",
        "&a ",
        "*a ",
        "!!int ",
        "<<: ",
        "---\n",
        "...\n",
        "%YAML 1.2\n",
        "|2-\n",
        "\\x",
        "\\U",
    ],
    *["\ufeff", "\u2028", "é", "\ud800", "0x1", "1e3", "no", ".inf", "name", "model"],
]


@given(st.lists(st.sampled_from(_TOKENS), max_size=30).map("".join) | st.text() | st.binary())
def test_any_text_at_all_gives_a_tree_or_printable_problems(text: str | bytes) -> None:
    try:
        source = parse_yaml(text, "f")
    except SpecError as error:
        problems = error.problems
    else:
        problems = source.problems
        assert isinstance(source.tree, dict)
    lines = "\n".join(str(problem) for problem in problems).split("\n") if problems else []
    assert len(lines) == len(problems)
    assert all(line.isprintable() for line in lines)
    assert all(problem.line >= 1 and problem.column >= 1 for problem in problems)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    def message(path: str | os.PathLike[str]) -> str:
        with pytest.raises(SpecError) as caught:
            read_bytes(path)
        (problem,) = caught.value.problems
        assert (problem.file, problem.line, problem.column, problem.field) == (os.fspath(path), 1, 1, "")
        return problem.message

    assert message(tmp_path / "missing.yaml") == "no such file"
    assert message(tmp_path) == "is a directory; a spec is one YAML file"
    assert message("a\0b") == "can't be read: embedded null byte"
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert message(loop).startswith("can't be read: ")


def test_a_large_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # Sparse: a terabyte that no test could read.
    with pytest.raises(SpecError, match=r"the file is 1,099,511,627,776 bytes; a spec has at most 1,048,576 bytes"):
        read_bytes(path)


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(SpecError, match="the file is larger; a spec has at most 1,048,576 bytes"):
        read_bytes("/dev/zero")


def test_a_file_at_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "full.yaml"
    path.write_bytes(b"a: 1 #".ljust(MAX_BYTES, b"x"))
    assert tree_of(read_bytes(path)) == {"a": 1}


def test_paths_and_values_are_shown_on_one_short_line() -> None:
    assert dotted(("kernels", "decode", "stages")) == "kernels.decode.stages"
    assert dotted(("a", 0, "b\nc")) == r"a[0].'b\nc'"
    assert shown("x" * 100) == "'" + "x" * 48 + "'... (100 characters)"
    assert shown("a\x1b\n") == r"'a\x1b\n'"
    values: list[Any] = [True, None, 3, 2.5, [], {}]
    assert [shown(value) for value in values] == ["true", "null", "3", "2.5", "a list", "a mapping"]
