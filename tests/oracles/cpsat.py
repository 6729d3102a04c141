"""CP-SAT as an oracle: optima of small planning problems, proven by code that shares nothing with ours."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ortools.sat.python import cp_model

from coordinator.planning.order.pipeline_problem import PipelineProblem


@dataclass(frozen=True, slots=True)
class Solved:
    """What the solver found in time: makespan (inf if none) and the bound it proved, in the problem's unit."""

    makespan_s: float
    bound_s: float

    @property
    def proven(self) -> bool:
        """Whether the makespan is the optimum."""
        return math.isclose(self.makespan_s, self.bound_s, rel_tol=1e-9)


def solve_pipeline(problem: PipelineProblem, ticks_per_s: int = 1, limit_s: float = 30.0) -> Solved:
    """The best makespan of a `schedule` problem; every duration times `ticks_per_s` must be a whole number.

    Microbatches are alike, so each (stage, op) may run them in their order: sorting the starts of any
    schedule breaks no dependency and no cap. That symmetry is all this model knows beyond coordinator/README.md.
    """

    def ticks(duration_s: float) -> int:
        result = round(duration_s * ticks_per_s)
        assert math.isclose(result, duration_s * ticks_per_s, abs_tol=1e-6), "durations must be whole ticks"
        return result

    stages, microbatches = range(problem.stages), range(problem.microbatches)
    forward = [ticks(value) for value in problem.forward_s]
    weight = [ticks(value) for value in problem.backward_weight_s]
    backward = [ticks(value) for value in problem.backward_input_s]
    if not problem.split_backward:
        backward = [b + w for b, w in zip(backward, weight, strict=True)]
    lengths = {"F": forward, "B": backward}
    if problem.split_backward:
        lengths["W"] = weight
    link = [ticks(value) for value in problem.link_s]
    horizon = problem.microbatches * sum(map(sum, lengths.values())) + 2 * sum(link) * problem.microbatches

    model = cp_model.CpModel()
    start, end = {}, {}
    for stage in stages:
        intervals = []
        for op, durations in lengths.items():
            for i in microbatches:
                key = (op, stage, i)
                start[key] = model.new_int_var(0, horizon, f"{op}{stage}.{i}")
                end[key] = start[key] + durations[stage]
                intervals.append(model.new_fixed_size_interval_var(start[key], durations[stage], f"i{key}"))
                if i > 0:
                    model.add(start[key] >= end[op, stage, i - 1])
        model.add_no_overlap(intervals)
    last_op = "W" if problem.split_backward else "B"
    for stage in stages:
        for i in microbatches:
            if stage > 0:
                model.add(start["F", stage, i] >= end["F", stage - 1, i] + link[stage - 1])
                model.add(start["B", stage - 1, i] >= end["B", stage, i] + link[stage - 1])
            model.add(start["B", stage, i] >= end["F", stage, i])
            if problem.split_backward:
                model.add(start["W", stage, i] >= end["B", stage, i])
            if problem.activations_max is not None and i >= problem.activations_max[stage]:
                model.add(start["F", stage, i] >= end[last_op, stage, i - problem.activations_max[stage]])
    makespan = model.new_int_var(0, horizon, "makespan")
    for stage in stages:
        model.add(makespan >= end[last_op, stage, problem.microbatches - 1])
    model.minimize(makespan)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.solve(model)
    if status == cp_model.UNKNOWN:  # nothing found in time
        return Solved(math.inf, solver.best_objective_bound / ticks_per_s)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return Solved(solver.objective_value / ticks_per_s, solver.best_objective_bound / ticks_per_s)
