"""The command that all others belong to, and how they fail."""

from __future__ import annotations

from typing import Any

import click

from mlaforge import __version__

_EXIT_CODES = """
\b
Exit codes:
  0  all is well
  1  a check or a verification failed, or an endpoint did not answer
  2  a spec or the command line is wrong
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


@click.group(
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
