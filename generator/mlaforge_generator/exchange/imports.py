"""A file of somebody else's to a spec, whichever kind of file it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .c_header import read_header
from .draft import Draft, ForeignFileError, Imported, finish, parse_json
from .hugging_face import read_config
from .plugin_json import PLUGIN, read_plugin

MAX_BYTES = 1 << 20
"""Longest file that is read; a config.json has some thousand bytes."""


def import_file(path: Path, settings: Mapping[str, object]) -> Imported:
    """Make a spec of a config.json, a plugin's JSON or a C header of constants; the content tells which it is.

    Args:
        path: the file.
        settings: dotted fields of the spec and their values, which go before what the file says.

    Raises:
        ForeignFileError: the file can't be read, has faults or lacks a field.
    """
    return finish(_read(_read_bytes(path), str(path), settings))


def _read(data: bytes, filename: str, settings: Mapping[str, object]) -> Draft:
    if data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"[")):
        tree = parse_json(data, filename)
        return (read_plugin if PLUGIN in tree else read_config)(tree, filename, settings)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ForeignFileError(f"{filename}: not UTF-8: byte 0x{data[error.start]:02x}") from None
    return read_header(text, filename, settings)


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            # One byte more than the limit tells a device or a pipe from a file that fits.
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ForeignFileError(f"{path}: can't be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise ForeignFileError(f"{path}: the file is larger than {MAX_BYTES:,} bytes")
    return data
