"""The command that all others belong to, and how they fail."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any

import click

from mlaforge import __version__

_EXIT_CODES = """
\b
Exit codes:
  0  all is well
  1  a check or a verification failed, an endpoint did not answer, or the command was interrupted
  2  a spec or the command line is wrong, or a file can't be read or written
  3  a kernel does not compile, or the toolchain is incomplete
  4  there is no Hopper GPU to run on
"""


class Failure(click.ClickException):
    """A check or a verification that failed. Its message is printed alone: the faults of a spec name their own file."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Print the message."""
        click.echo(self.message, file=file, err=file is None)


class UsageFailure(Failure):
    """A spec or a file that is wrong."""

    exit_code = 2


class ToolchainFailure(Failure):
    """A kernel that does not compile, or a toolchain that is not there."""

    exit_code = 3


class DeviceFailure(Failure):
    """No GPU that the kernels run on."""

    exit_code = 4


class _Group(click.Group):
    """Commands that tell in a line what the system refuses wherever nothing better is said of it."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            # Whoever reads the output has seen enough: click ends quietly.
            if error.errno == errno.EPIPE:
                raise
            if error.filename is None:
                _drop_output()
            where = "" if error.filename is None else f"{error.filename}: "
            raise UsageFailure(f"{where}{error.strerror or error}") from None


def _drop_output() -> None:
    """Let nothing be written that is still in the buffer of stdout, which may be what failed."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EXIT_CODES,
)
@click.version_option(__version__)
def cli() -> None:
    """Make MLA attention kernels for Hopper GPUs from YAML specs.

    SPEC is a YAML file, or the name of a shipped spec such as deepseek_v3.
    """


def main() -> None:
    """Run the command line."""
    cli(prog_name="mlaforge")


COUNT = click.IntRange(min=1)
