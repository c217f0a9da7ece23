"""What is wrong with a spec, and where in its file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Problem:
    """One fault of a spec. Line and column count from 1; `field` is a dotted path, empty for the file as a whole."""

    file: str
    line: int
    column: int
    field: str
    message: str

    def __str__(self) -> str:
        """Give `file:line:column: field: message`, the form that editors make clickable."""
        field = f"{self.field}: " if self.field else ""
        return f"{self.file}:{self.line}:{self.column}: {field}{self.message}"


class SpecError(Exception):
    """A spec that can't be used; `problems` holds every fault that was found, in the order of the file."""

    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem]) -> None:
        """Sort the problems by position and drop exact repeats."""
        self.problems = tuple(sorted(set(problems)))
        # The argument in `args` is what makes the exception survive pickling between processes.
        super().__init__(self.problems)

    def __str__(self) -> str:
        """Give one line per problem."""
        return "\n".join(str(problem) for problem in self.problems)
