"""YAML text to a plain tree, with the position of every key and value.

Only the part of YAML that a spec needs is read: one document of mappings, lists and YAML 1.2 core scalars. PyYAML
parses the text into events and no further, because its own composer and constructor follow YAML 1.1 (`no` is False,
`1e-3` is a string, `010` is 8), keep the last of two equal keys without a word, and recurse as deep as the input says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeAlias

import yaml

from .errors import Problem, SpecError

MAX_BYTES = 1 << 20
"""Longest file that is read: PyYAML is slow, and a spec is about a thousand bytes."""

MAX_DEPTH = 32
"""Deepest nesting of mappings and lists; it also bounds the recursion of the reader."""

MAX_NODES = 10_000
"""Most keys, values and collections of one file; a spec has about sixty."""

_MAX_DIGITS = 40  # Longer integers stay text: Python refuses to convert some of them, and no field can hold any.
_MAX_SHOWN = 48

KeyPath: TypeAlias = tuple[str | int, ...]
Tree: TypeAlias = "bool | int | float | str | list[Tree] | dict[str, Tree] | None"

_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = {"", "~", "null", "Null", "NULL"}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")

_OLD_BOOL = re.compile(r"y|Y|yes|Yes|YES|n|N|no|No|NO|on|On|ON|off|Off|OFF")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_OTHER_INT = re.compile(
    r"[-+]?(0[xX][0-9a-fA-F][0-9a-fA-F_]*|0[oO][0-7][0-7_]*|0[bB][01][01_]*|[0-9]+(_[0-9]+)+|[0-9]{1,3}(,[0-9]{3})+)"
)

_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
# What YAML calls printable, less the byte-order mark: it can't be seen, and PyYAML doesn't count it in columns.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class Position(NamedTuple):
    """A place in a file; both numbers count from 1."""

    line: int
    column: int


_START = Position(1, 1)


class Place(NamedTuple):
    """Where one entry stands: its key, and its value. A collection, having no text of its own, stands at its key."""

    key: Position
    value: Position


@dataclass(frozen=True)
class Origin:
    """Where the entries of a tree stand in their file.

    Any two origins compare equal: where a thing was written is no part of what it means.
    """

    filename: str = field(default="<spec>", compare=False)
    places: Mapping[KeyPath, Place] = field(default_factory=dict, compare=False)

    def problem(self, path: KeyPath, message: str, *, at_key: bool = False) -> Problem:
        """Make a problem at the value (or the key) of `path`, or at the key of its nearest existing parent."""
        place = self.places.get(path)
        if place is not None:
            position = place.key if at_key else place.value
        else:
            parents = (self.places.get(path[:length]) for length in range(len(path) - 1, -1, -1))
            position = next((parent.key for parent in parents if parent is not None), _START)
        return Problem(self.filename, position.line, position.column, dotted(path), message)


@dataclass(frozen=True)
class Source:
    """The tree of one file, and what is known about its entries.

    `problems` are faults after which reading could go on, so that a caller can report them together with its own;
    `refused` are the paths they lie at, where the tree holds no usable value. `hints` say, of a scalar that was read
    as text, why that may surprise.
    """

    tree: dict[str, Tree]
    origin: Origin
    problems: tuple[Problem, ...]
    refused: frozenset[KeyPath]
    hints: Mapping[KeyPath, str]

    def is_refused(self, path: KeyPath) -> bool:
        """Tell whether the entry at `path`, or one that holds it, already has a problem."""
        return any(path[:length] in self.refused for length in range(1, len(path) + 1))


def parse_yaml(text: str | bytes, filename: str = "<string>") -> Source:
    """Read YAML text; SpecError if it gives no tree at all, `Source.problems` for the rest."""
    return _Reader(_decode(text, filename), filename).read()


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a spec's file, never more than MAX_BYTES of it; SpecError if there is no such file or it is larger."""
    filename = os.fspath(path)
    try:
        with open(filename, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            # One byte more than the limit tells a device or a pipe, whose size reads 0, from a file that fits.
            data = b"" if size > MAX_BYTES else stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        _fail(filename, "no such file")
    except IsADirectoryError:
        _fail(filename, "is a directory; a spec is one YAML file")
    except OSError as error:
        _fail(filename, f"can't be read: {error.strerror or error}")
    except ValueError as error:  # A NUL in the path.
        _fail(filename, f"can't be read: {error}")
    if size > MAX_BYTES or len(data) > MAX_BYTES:
        _fail(filename, _too_large(f"{size:,} bytes" if size > MAX_BYTES else "larger"))
    return data


def dotted(path: KeyPath) -> str:
    """Write a path as `kernels.decode.stages` or `a[0].b`, on one line whatever the keys are."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _PLAIN_NAME.fullmatch(part) and len(part) <= 80 else shown(part))
    return text


def shown(value: Tree) -> str:
    """Name a value in a message: short, and without line breaks or control characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        return f"{value[:_MAX_SHOWN]!r}... ({len(value)} characters)"
    return repr(value)


def _fail(filename: str, message: str, position: Position = _START) -> NoReturn:
    raise SpecError([Problem(filename, position.line, position.column, "", message)])


def _too_large(size: str) -> str:
    return f"the file is {size}; a spec has at most {MAX_BYTES:,} bytes"


def _decode(data: str | bytes, filename: str) -> str:
    if len(data) > MAX_BYTES:
        _fail(filename, _too_large(f"{len(data):,} {'bytes' if isinstance(data, bytes) else 'characters'}"))
    text = data if isinstance(data, str) else _decode_utf8(data, filename)
    text = text.removeprefix("\ufeff")
    if bad := _FORBIDDEN.search(text):
        message = f"character U+{ord(bad.group()):04X} is not allowed; remove it"
        _fail(filename, message, _position(text[: bad.start()]))
    return text


def _decode_utf8(data: bytes, filename: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        position = _position(data[: error.start].decode("utf-8"))
        _fail(filename, f"not UTF-8: byte 0x{data[error.start]:02x}; save the file as UTF-8", position)


def _position(before: str) -> Position:
    lines = _LINE_BREAK.split(before)
    return Position(len(lines), len(lines[-1]) + 1)


def _resolve(text: str) -> Tree:
    """Give a plain scalar its YAML 1.2 core meaning; integers in decimal only."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if infinity := _INFINITY.fullmatch(text):
        return float(infinity.group(1) + "inf")
    if _NAN.fullmatch(text):
        return float("nan")
    return text


def _hint_plain(text: str) -> str | None:
    """Say why an unquoted scalar that looks like a number or a boolean was read as text."""
    if _OLD_BOOL.fullmatch(text):
        return f"unquoted {text} is text in YAML 1.2; a boolean is true or false"
    if _INT.fullmatch(text):
        return f"a number of more than {_MAX_DIGITS} digits is read as text"
    if len(text) > _MAX_DIGITS:
        return None
    if _LEADING_ZERO.fullmatch(text):
        return "a leading zero makes it text, because it may mean octal; write the number without it"
    if _OTHER_INT.fullmatch(text):
        digits = text.replace("_", "").replace(",", "")
        based = digits.lstrip("+-")[:2].lower() in {"0x", "0o", "0b"}
        return f"integers are written in plain decimal: {int(digits, 0 if based else 10)}"
    return None


class _Reader:
    """Recursive descent over PyYAML's events, for one text."""

    def __init__(self, text: str, filename: str) -> None:
        self.filename = filename
        self.loader = yaml.SafeLoader(text)
        self.nodes = 0
        self.places: dict[KeyPath, Place] = {}
        self.hints: dict[KeyPath, str] = {}
        self.refused: set[KeyPath] = set()
        self.problems: list[Problem] = []

    def read(self) -> Source:
        self.next()  # The start of the stream.
        event = self.next()
        if isinstance(event, yaml.StreamEndEvent):
            _fail(self.filename, "the file is empty; a spec needs at least name and model")
        if isinstance(event, yaml.DocumentStartEvent) and (event.version or event.tags):
            self.fail(event, "directives (lines that start with %) are not allowed; remove them")
        event = self.next()
        tree = self.value(event, (), None)
        if not isinstance(tree, dict):
            found = "nothing" if tree is None else shown(tree)
            self.fail(event, f"the top level must be a mapping with at least name and model; got {found}")
        self.next()  # The end of the document.
        event = self.next()
        if not isinstance(event, yaml.StreamEndEvent):
            self.fail(event, "a second YAML document starts here; a file holds one spec")
        origin = Origin(self.filename, self.places)
        return Source(tree, origin, tuple(self.problems), frozenset(self.refused), self.hints)

    def next(self) -> yaml.Event:
        """Give the next event; PyYAML's faults become SpecError, with what was found before."""
        try:
            event: yaml.Event = self.loader.get_event()  # type: ignore[no-untyped-call]
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            position = Position(mark.line + 1, mark.column + 1) if mark else _START
            if error.problem and r"'\t'" in error.problem:
                message = "a tab can't be used here; YAML is indented and separated with spaces"
            else:
                context = f" ({error.context})" if error.context else ""
                message = f"not valid YAML: {error.problem}{context}"
        except (ValueError, OverflowError):
            # PyYAML converts escapes such as "\UFFFFFFFF" and the numbers of directives without checking their range.
            mark = self.loader.get_mark()
            position = Position(mark.line + 1, mark.column + 1)
            message = "not valid YAML: a number or an escaped character here is out of range"
        else:
            return event
        raise SpecError([*self.problems, Problem(self.filename, *position, "", message)])

    def value(self, event: yaml.Event, path: KeyPath, key: Position | None) -> Tree:
        """Read the value that starts with `event`; `key` is where its key stands, if it has one."""
        start = _start(event)
        is_collection = isinstance(event, yaml.CollectionStartEvent)
        self.places[path] = Place(key or start, (key or start) if is_collection else start)
        self.check_node(event, path)
        if is_collection and len(path) >= MAX_DEPTH:
            self.fail(event, f"nested more than {MAX_DEPTH} deep; a spec needs 3 levels")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Tree] = []
            while not isinstance(event := self.next(), yaml.SequenceEndEvent):
                items.append(self.value(event, (*path, len(items)), None))
            return items
        return self.scalar(event, path) if isinstance(event, yaml.ScalarEvent) else None

    def mapping(self, path: KeyPath) -> dict[str, Tree]:
        """Read the rest of a mapping."""
        entries: dict[str, Tree] = {}
        while not isinstance(event := self.next(), yaml.MappingEndEvent):
            start = _start(event)
            key = self.key(event, path)
            if key is None:
                self.value(self.next(), (*path, "?"), start)
                continue
            at = (*path, key)
            if key in entries:
                first = self.places[at].key
                both = f"line {first.line} column {first.column} and line {start.line} column {start.column}"
                self.refuse(at, start, f"written twice, at {both}; remove one of the two")
            entries[key] = self.value(self.next(), at, start)
        return entries

    def key(self, event: yaml.Event, path: KeyPath) -> str | None:
        """Read one key; None, with a problem, if it is not text."""
        start = _start(event)
        if isinstance(event, yaml.AliasEvent):
            self.check_node(event, path)
            return None
        if not isinstance(event, yaml.ScalarEvent):
            key = self.value(event, (*path, "?"), start)
            self.refuse_key(path, start, f"a key must be plain text; got {shown(key)}")
            return None
        self.check_node(event, (*path, event.value))
        plain = event.style is None
        key = _resolve(event.value) if plain else event.value
        if plain and key == "<<":
            self.refuse_key(path, start, "merge keys (<<) are not allowed; write the fields out")
            return None
        if not isinstance(key, str):
            self.refuse_key(path, start, f"a key must be text; got {shown(key)}, which is not unless quoted")
            return None
        if _SURROGATE.search(key):
            self.refuse_key(path, start, "a key holds half of a surrogate pair, which is no character")
            return None
        return key

    def scalar(self, event: yaml.ScalarEvent, path: KeyPath) -> Tree:
        """Read a scalar, and keep a hint if its meaning may surprise."""
        text: str = event.value
        if _SURROGATE.search(text):
            self.refuse(path, _start(event), "holds half of a surrogate pair, which is no character")
            return None
        value = _resolve(text)
        if event.style is not None:
            if isinstance(value, int | float):
                self.hints[path] = "remove the quotes"
            return text
        if isinstance(value, str) and (hint := _hint_plain(text)):
            self.hints[path] = hint
        return value

    def check_node(self, event: yaml.Event, path: KeyPath) -> None:
        """Refuse what YAML allows on any node and a spec has no use for."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self.fail(event, f"more than {MAX_NODES:,} keys and values; this is no spec")
        start = _start(event)
        if isinstance(event, yaml.AliasEvent):
            self.refuse(path, start, f"aliases ({shown(event.anchor)}) are not allowed; write the value out")
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            if event.anchor is not None:
                self.refuse(path, start, f"anchors ({shown(event.anchor)}) are not allowed; write each value out")
            if event.tag is not None:
                self.refuse(path, start, f"tags ({shown(event.tag)}) are not allowed; remove it")

    def refuse(self, path: KeyPath, position: Position, message: str) -> None:
        """Keep a problem after which reading can go on."""
        self.refused.add(path)
        self.problems.append(Problem(self.filename, *position, dotted(path), message))

    def refuse_key(self, parent: KeyPath, position: Position, message: str) -> None:
        """Keep a problem with a key that can't be named, which is then a problem of the mapping it is in."""
        self.problems.append(Problem(self.filename, *position, dotted(parent), message))

    def fail(self, event: yaml.Event, message: str) -> NoReturn:
        """Give up, with all problems so far."""
        raise SpecError([*self.problems, Problem(self.filename, *_start(event), "", message)])


def _start(event: yaml.Event) -> Position:
    mark = event.start_mark
    assert mark is not None, "PyYAML's parser marks every event"
    return Position(mark.line + 1, mark.column + 1)
