"""Secrets kept out of what is printed, whoever said them: a server may quote the key that it was sent."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import Any

LONGEST_SHOWN = 4
"""Characters of a secret in a row that may stand in a text: by chance, or in a word."""

MASK = "***"


class Redactor:
    """Masks secrets, and every part of them longer than `LONGEST_SHOWN` characters, in capitals or not."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Keep what is to be masked; blanks around a secret are no part of it, and an empty one is none."""
        self._pieces: set[str] = set()
        short: list[str] = []
        for secret in {secret.strip() for secret in secrets}:
            if len(secret) > LONGEST_SHOWN:
                for form in (secret, *_base64(secret)):
                    self._pieces |= set(_pieces(_lower(form)))
            elif secret:
                short.append(re.escape(secret))
        # Of so few characters, the whole as a word: masked everywhere, a letter would take all text with it.
        self._short = re.compile(rf"(?<!\w)(?:{'|'.join(short)})(?!\w)") if short else None

    def __call__(self, text: str) -> str:
        """Mask a text."""
        lower = _lower(text)
        width = LONGEST_SHOWN + 1
        masked: list[str] = []
        hidden_to = 0
        for i, character in enumerate(text):
            if lower[i : i + width] in self._pieces:
                if hidden_to <= i:
                    masked.append(MASK)
                hidden_to = i + width
            if hidden_to <= i:
                masked.append(character)
        result = "".join(masked)
        return self._short.sub(MASK, result) if self._short else result

    def data(self, value: Any) -> Any:
        """Mask the texts of plain data; names in mappings are ours and stay."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {name: self.data(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(each) for each in value]
        return value


def _lower(text: str) -> str:
    """Give lower case of the same length."""
    return "".join(lower if len(lower := character.lower()) == 1 else character for character in text)


def _pieces(text: str) -> Iterator[str]:
    width = LONGEST_SHOWN + 1
    for i in range(len(text) - width + 1):
        if not text[i : i + width].isspace():
            yield text[i : i + width]


def _base64(secret: str) -> Iterator[str]:
    """Give a secret as base64 shows it at each of the three places that it can have in a longer text."""
    for before in range(3):
        data = b"\0" * before + secret.encode(errors="replace")
        # What is before and behind it takes part in the characters at both ends.
        whole = base64.b64encode(data[: len(data) // 3 * 3]).decode()
        yield whole[4 if before else 0 :]
