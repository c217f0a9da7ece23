"""The kernels beside decode, each planned by a module of its own."""

from __future__ import annotations

from collections.abc import Callable

from .errors import Problem, SpecError
from .kernel_plan import Choice, KernelPlan
from .memory_plan import plan_append, plan_gather, plan_merge
from .prefill_plan import plan_prefill
from .spec import Spec
from .target import Target

PLANNERS: tuple[Callable[[Spec, Target], KernelPlan | Choice], ...] = (
    plan_gather,
    plan_append,
    plan_merge,
    plan_prefill,
)
"""In the order of the manifest.

A planner gives the choice of none, and why, for a spec that can't have its kernel and does without. It raises SpecError
where a spec asks for what can't be.
"""


def plan_kernels(spec: Spec, target: Target) -> tuple[tuple[KernelPlan, ...], tuple[Choice, ...]]:
    """Plan them all; give those that there are, and what was chosen for any.

    Raises:
        SpecError: what every planner that refuses has to say.
    """
    plans: list[KernelPlan] = []
    choices: list[Choice] = []
    problems: list[Problem] = []
    for planner in PLANNERS:
        try:
            planned = planner(spec, target)
        except SpecError as error:
            problems += error.problems
            continue
        if isinstance(planned, Choice):
            choices.append(planned)
        else:
            plans.append(planned)
            choices += planned.choices
    if problems:
        raise SpecError(problems)
    return tuple(plans), tuple(choices)
