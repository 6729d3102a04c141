"""A machine of the operator that computes others' work again, and nothing of its own: `barnraise audit LINK`.

It holds the parameters of one stage as a volunteer does, asks nobody for work, and answers the orders of the stage's
ledger. Where servers compute nothing (`stages.collocated = "never"`) such machines are the only auditors.
"""

from __future__ import annotations

from node.volunteer.volunteer import VolunteerMachine
from protocol.base.ids import NodeId
from protocol.messages import Ready


class AuditingMachine(VolunteerMachine):
    """Hosted by `node.machine.roles.Roles` in place of a volunteer."""

    def _greet(self, server: NodeId, hello: bool) -> None:
        """Asks whether the shard is ready; the ledger takes it for the word that a device is here."""
        self._out.send(server, Ready(ledger_generation=self.generation, hello=hello, slots=0))

    def _ask_for_work(self, now: float) -> None:
        """It takes none."""

    def waiting_for(self) -> str:
        found = super().waiting_for()
        return "something to audit" if found == "work" else found
