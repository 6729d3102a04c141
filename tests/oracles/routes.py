"""CP-SAT as an oracle for waves of routes: proven optima of small problems, sharing no search with ours."""

from __future__ import annotations

from collections import defaultdict

from ortools.sat.python import cp_model

from coordinator.planning.routes.bounds import all_routes
from coordinator.planning.routes.evaluate import steps_of
from coordinator.planning.routes.model import RouteModel


def solve_routes(model: RouteModel, ticks_per_s: int, limit_s: float = 30.0) -> tuple[float, float]:
    """(best makespan, proven bound) of one wave; every duration times `ticks_per_s` must be a whole number."""

    def ticks(seconds: float) -> int:
        whole = round(seconds * ticks_per_s)
        assert abs(whole - seconds * ticks_per_s) < 1e-6, "durations must be whole ticks"
        return whole

    solver_model = cp_model.CpModel()
    visits = defaultdict(list)
    uses = defaultdict(list)
    on_node = defaultdict(list)
    horizon = sum(
        max(ticks(steps_of(model, route).alone_s) for route in all_routes(model, head, 10**5) or [])
        for head in model.heads
    )
    makespan = solver_model.new_int_var(0, horizon, "makespan")
    for agent, head in enumerate(model.heads):
        routes = all_routes(model, head, 10**5) or []
        chosen = [solver_model.new_bool_var(f"x{agent}.{number}") for number in range(len(routes))]
        solver_model.add_exactly_one(chosen)
        count = 2 * model.route_stages + 1
        start = [solver_model.new_int_var(0, horizon, f"s{agent}.{k}") for k in range(count)]
        at = defaultdict(list)
        for pick, route in zip(chosen, routes, strict=True):
            steps = steps_of(model, route)
            for node in route:
                uses[node].append(pick)
                visits[model.stage_of_node[node]].append(pick)
            for k, node in enumerate(steps.nodes):
                at[k, node, ticks(steps.busy_s[k])].append(pick)
                if k:
                    before = ticks(steps.work_s[k - 1]) + ticks(steps.link_s[k])
                    solver_model.add(start[k] >= start[k - 1] + before).only_enforce_if(pick)
            end = start[-1] + ticks(steps.work_s[-1])
            solver_model.add(makespan >= end).only_enforce_if(pick)
        for (k, node, busy), picks in at.items():
            there = solver_model.new_bool_var(f"at{agent}.{k}.{node}")
            solver_model.add(sum(picks) == there)
            on_node[node].append(
                solver_model.new_optional_fixed_size_interval_var(start[k], busy, there, f"i{agent}.{k}.{node}")
            )
    for intervals in on_node.values():
        solver_model.add_no_overlap(intervals)
    for node, picks in uses.items():
        solver_model.add(sum(picks) <= model.memory[node])
    for stage in range(1, model.stages):
        solver_model.add(sum(visits[stage]) == model.visits[stage])
    solver_model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.solve(solver_model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return solver.objective_value / ticks_per_s, solver.best_objective_bound / ticks_per_s
