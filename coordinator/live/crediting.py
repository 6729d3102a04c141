"""What of a member's work counts: accepted, and vouched for by audits."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.live.admission import Admission
from coordinator.live.giving import Giving
from protocol.base.ids import NodeId
from protocol.run.run import RunConfig
from protocol.trust.credit import CreditLedger, CreditRow


def credit_ledger(
    config: RunConfig,
    run_id: bytes,
    giving: Giving,
    admission: Admission,
    servers: Collection[NodeId],
    wall_s: float,
) -> CreditLedger:
    """Everybody who ever gave anything, the most first. `servers` of the plan are audited by nobody, and believed."""
    rows = []
    for credit in giving.all():
        audited = config.audit.first if credit.node in servers else credit.audited
        # Who is out for whom it came with loses its place, and nothing of what it gave.
        ban = None if admission.is_kin(credit.node) else admission.ban_reason(credit.node)
        why = _why_not(config, audited, ban)
        rows.append(
            CreditRow(
                node=credit.node,
                tasks=credit.tasks,
                tokens=credit.tokens,
                audited=credit.audited,
                credited=0 if why else credit.tasks,
                since_unix_s=int(credit.since_s),
                until_unix_s=int(credit.until_s),
                why=why,
            )
        )
    return CreditLedger(run=config.name, run_id=run_id.hex(), written_unix_s=int(wall_s), rows=tuple(rows))


def _why_not(config: RunConfig, audited: int, ban: str | None) -> str:
    if ban is not None:
        return f"banned: {ban}"
    if config.audit.rate > 0 and audited < config.audit.first:
        return f"{audited} tasks were audited; {config.audit.first} are needed"
    return ""
