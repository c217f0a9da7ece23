"""The kernels beside decode, each planned by a module of its own."""

from __future__ import annotations

from collections.abc import Callable

from .errors import Problem, SpecError
from .kernel_plan import KernelPlan
from .memory_plan import plan_append, plan_gather, plan_merge
from .spec import Spec
from .target import Target

PLANNERS: tuple[Callable[[Spec, Target], KernelPlan], ...] = (plan_gather, plan_append, plan_merge)
"""In the order of the manifest. A planner raises SpecError where a spec can't have its kernel."""


def plan_kernels(spec: Spec, target: Target) -> tuple[KernelPlan, ...]:
    """Plan them all; SpecError, with what every planner has to say, if one of them can't exist."""
    plans: list[KernelPlan] = []
    problems: list[Problem] = []
    for planner in PLANNERS:
        try:
            plans.append(planner(spec, target))
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return tuple(plans)
