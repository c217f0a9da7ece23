"""The command line, and the only part of the generator that knows the runtime, too.

A module holds a family of commands; `group` has what they belong to. What a command does not need is not imported:
`plan`, `generate` and `schema` run without torch and CUDA. Results go to stdout, progress and errors to stderr.
"""

from . import bench, cache, compile, doctor, exchange, generate, make, probe, report, trace, tune, verify
from .group import cli, main

__all__ = [
    "bench",
    "cache",
    "cli",
    "compile",
    "doctor",
    "exchange",
    "generate",
    "main",
    "make",
    "probe",
    "report",
    "trace",
    "tune",
    "verify",
]
