"""What no honest member says to the coordinator: whoever does is sent away with the sentence. Pure."""

from __future__ import annotations

import math

from coordinator.live.adoption import fault_of_shown
from coordinator.live.roster import Member
from protocol.base.limits import ADDRESSES_MAX
from protocol.messages import Join, StepReport
from protocol.run.batches import Batches
from protocol.run.plan import Plan

AUDITED_STEPS = 4096
"""Audits are over within 16 steps of their own; a member that comes seldom is told its share of many at once."""


def fault_of_report(report: StepReport, batches: Batches, plan: Plan) -> str:
    """What no honest decider says of a step, its validation, and who computed it, or an empty string.

    Each microbatch has one task at each place of its route, which may come to a stage several times (a loop that ends
    where it began, chunks).
    """
    config = batches.now
    if not 0 <= report.step < config.steps:
        return f"StepReport of step {report.step}"
    if not 0 <= report.changes <= len(plan.changes):
        return f"StepReport with {report.changes} of {len(plan.changes)} changes"
    versions = [found.version for found in report.validations]
    # With the run's last step come those that no step runs on.
    own, last = report.step - config.batch.delay, report.step == config.steps - 1
    allowed = range(max(0, own), config.steps + 1 if last else own + 1)
    if not set(versions) <= set(allowed) or len(set(versions)) < len(versions):
        return f"versions {versions} validated with step {report.step}"
    if any(found.tokens < 1 or found.loss < 0 for found in report.validations):
        return "a validation of no tokens, or with a loss below 0"
    nodes = {share.node for share in report.shares}
    tasks = sum(share.tasks for share in report.shares)
    most = sum(plan.length(report.step, microbatch) for microbatch in range(batches.count(report.step)))
    if len(nodes) < len(report.shares) or any(share.tasks < 1 for share in report.shares) or tasks > most:
        return f"shares of {tasks} tasks, where a step has {most}"
    if any(not 0 <= share.audited <= AUDITED_STEPS * most for share in report.shares):
        return "shares of more audited tasks than there can be"
    return ""


def fault_of_join(member: Member, join: Join) -> str:
    """What no honest node says, or an empty string."""
    if join.role != member.role:
        return f"asked to be a {join.role} with the credential of a {member.role}"
    if not (math.isfinite(join.tokens_per_s) and 0 <= join.tokens_per_s <= 1e12):
        return f"tokens_per_s {join.tokens_per_s} cannot be"
    if len(join.addresses) > ADDRESSES_MAX or len(join.local_addresses) > ADDRESSES_MAX or len(join.checkpoints) > 16:
        return "more addresses or checkpoints than allowed"
    if join.plan is not None:
        return fault_of_shown(join.plan) if member.role == "server" else "a volunteer that shows a plan"
    return ""
