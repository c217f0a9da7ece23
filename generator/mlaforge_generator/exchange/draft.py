"""A spec in the making, from a file that somebody else wrote.

Nothing in such a file is trusted: what is taken from it is checked by the spec's own rules, and what is repeated from
it, in messages and in comments, is kept to one line of ASCII. Nothing is dropped without a word, either: a draft keeps
what it could not use, and says why where that is known.
"""

from __future__ import annotations

import copy
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from ..errors import Problem, SpecError
from ..spec import Spec, check_spec, parse_spec
from ..yaml_source import MAX_DEPTH, Tree, parse_yaml

_WIDTH = 116
_MAX_SHOWN = 60


class ForeignFileError(ValueError):
    """A file that no spec can be made of; every line of the message is one fault, with the field's name."""


@dataclass(frozen=True)
class Note:
    """A field of the file that the spec does not say."""

    field: str
    value: str
    """As it may stand in a line of text."""
    why: str

    def __str__(self) -> str:
        """Give the note in a line."""
        return f"{self.field} = {self.value}: {self.why}"


@dataclass
class Draft:
    """What was taken from a file, and what was not."""

    filename: str
    kind: str
    """What the file is, in a few words."""
    tree: dict[str, Any] = field(default_factory=dict)
    """As the YAML of a spec."""
    sources: dict[str, str] = field(default_factory=dict)
    """Names in the file, by the spec's dotted names."""
    notes: list[Note] = field(default_factory=list)
    """What may matter to the kernels and has no place in a spec."""
    others: list[str] = field(default_factory=list)
    """Names of fields that are no part of a spec."""
    faults: list[str] = field(default_factory=list)
    settings: Mapping[str, object] = field(default_factory=dict)
    """Dotted fields of the spec that the user gave, which go before what the file says."""

    def put(self, target: str, value: object, source: str) -> None:
        """Take a value for a dotted field of the spec; a field that is taken twice is a fault."""
        parent, name = self._parent(self.tree, target)
        if parent is None or name in parent:
            earlier = self.sources.get(target, "something before it")
            message = f"says the same as {name_of(earlier)}, or contradicts it; remove one of the two"
            self.fault(source, message, target)
            return
        self.sources[target] = source
        parent[name] = value

    def whole(self) -> dict[str, Any]:
        """Give the tree with the user's settings, but for those of a field inside of what is no mapping."""
        tree = copy.deepcopy(self.tree)
        for target, value in self.settings.items():
            parent, name = self._parent(tree, target)
            if parent is not None:
                parent[name] = value
        return tree

    def misplaced(self) -> list[str]:
        """Name the settings that have no place, for they are of a field inside of what is no mapping."""
        return [target for target in self.settings if self._parent(self.whole(), target)[0] is None]

    @staticmethod
    def _parent(tree: dict[str, Any], target: str) -> tuple[dict[str, Any] | None, str]:
        *parents, name = target.split(".")
        node: Any = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                return None, name
        return node, name

    def note(self, source: str, value: object, why: str) -> None:
        """Keep what the spec can't say."""
        self.notes.append(Note(name_of(source), value_of(value), why))

    def fault(self, source: str, message: str, target: str = "") -> None:
        """Keep a fault, to be told with all others; none if it is in a field of the spec that the user has set."""
        if not any(f"{target}.".startswith(f"{each}.") for each in self.settings):
            self.faults.append(f"{self.filename}: {name_of(source)}: {message}")


@dataclass(frozen=True)
class Imported:
    """A spec, and the text of its file: what is not in the spec stands in the text's comments."""

    spec: Spec
    text: str
    notes: tuple[Note, ...]
    others: tuple[str, ...]


def parse_setting(target: str, text: str) -> object:
    """Read the value of a setting, which is YAML; ForeignFileError if it is none."""
    try:
        tree = parse_yaml(f"value: {text}", f"--set {name_of(target)}").tree
    except SpecError as error:
        raise ForeignFileError(str(error)) from None
    if set(tree) != {"value"}:
        raise ForeignFileError(f"--set {name_of(target)}: must be one value; got {value_of(text)}")
    return tree["value"]


def finish(draft: Draft) -> Imported:
    """Check a draft and write it down.

    Raises:
        ForeignFileError: the file has faults, or lacks a field.
    """
    faults = list(draft.faults)
    faults += [f"--set {name_of(target)}: what it is in is no mapping" for target in draft.misplaced()]
    spec = None
    try:
        spec = check_spec(draft.whole(), draft.filename)
    except SpecError as error:
        # What the file says wrongly is not missing.
        faults += [
            _reword(draft, problem)
            for problem in error.problems
            if not (_is_missing(problem) and problem.field in draft.sources)
        ]
    if spec is None or faults:
        raise ForeignFileError("\n".join(faults))
    text = _text(draft, spec)
    assert parse_spec(text) == spec, "what is written is what was checked"
    return Imported(spec, text, tuple(draft.notes), tuple(draft.others))


def _is_missing(problem: Problem) -> bool:
    return problem.message.startswith("missing")


def _reword(draft: Draft, problem: Problem) -> str:
    """Say a fault of the spec in the words of the file that it came from."""
    message = problem.message
    if problem.field in draft.settings:
        return f"--set {name_of(problem.field)}: {message}"
    if problem.field == "name":
        return f"{draft.filename}: {name_of(draft.sources.get('name', 'name'))}: {message}; --name gives another"
    source = draft.sources.get(problem.field, problem.field)
    if _is_missing(problem):
        message += f"; --set {problem.field}=VALUE gives what the file does not say"
    return f"{draft.filename}: {name_of(source)}: {message}"


def _text(draft: Draft, spec: Spec) -> str:
    lines = [f"From {value_of(draft.filename.rpartition('/')[2])}, {draft.kind}, by `mlaforge import`."]
    comments = [f"# {line}" for text in lines for line in textwrap.wrap(text, _WIDTH)]
    if draft.notes:
        comments.append("# Not in this spec:")
        for note in draft.notes:
            comments += textwrap.wrap(
                str(note), _WIDTH, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False
            )
    if draft.others:
        comments += textwrap.wrap(
            f"No part of a spec: {', '.join(draft.others)}",
            _WIDTH,
            initial_indent="# ",
            subsequent_indent="#   ",
            break_on_hyphens=False,
        )
    said = spec.model_dump(exclude_unset=True)
    return "\n".join(comments) + "\n" + yaml.safe_dump(said, sort_keys=False)


def name_of(name: str) -> str:
    """Give a field's name as it may stand in a line of text."""
    plain = all(character.isascii() and (character.isalnum() or character in "_-.[]") for character in name)
    return name if plain and 0 < len(name) <= _MAX_SHOWN else value_of(name)


def value_of(value: object) -> str:
    """Give a value as it may stand in a line of text: ASCII, short, without line breaks or control characters."""
    text = json.dumps(value, default=str)
    # DEL is the one control character that JSON does not escape.
    text = text.replace("\x7f", "\\u007f")
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def parse_json(data: bytes, filename: str) -> dict[str, Tree]:
    """Read a JSON object of a file. Keys that stand twice, NaN, and nesting deeper than a spec's are faults."""

    def fail(message: str) -> NoReturn:
        raise ForeignFileError(f"{filename}: {message}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in items:
            if name in found:
                fail(f"{name_of(name)}: written twice; remove one of the two")
            found[name] = value
        return found

    try:
        tree = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=pairs,
            parse_constant=lambda word: fail(f"{word} is no JSON"),
        )
    except UnicodeDecodeError as error:
        fail(f"not UTF-8: byte 0x{data[error.start]:02x}")
    except json.JSONDecodeError as error:
        fail(f"line {error.lineno} column {error.colno}: not valid JSON: {error.msg}")
    except RecursionError:
        fail(f"nested more than {MAX_DEPTH} deep")
    except ForeignFileError:
        raise
    except ValueError:
        # Python refuses to convert numbers of thousands of digits.
        fail("a number is too long")
    if not isinstance(tree, dict):
        fail("the top level must be an object")
    level: list[Any] = [tree]
    for _ in range(MAX_DEPTH):
        inner = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        level = [each for each in inner if isinstance(each, dict | list)]
    if level:
        fail(f"nested more than {MAX_DEPTH} deep")
    return tree
