"""Whether all servers of a stage were told to count the same contributions: a step is applied when they were.

Each shard sums up what its ledger names, and no shard sees what the ledger names to others. A ledger that lies could
have one shard count what another leaves out, and the parts of one update would not belong together: weights that no
honest computation comes to, with every norm right. So each server tells its fellows a digest of the list, and holds
the step until all have told it the same.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from node.machine.waits import listed
from node.server.context import StageContext
from protocol.base.ids import ContributionId, NodeId
from protocol.messages import FrozenList

DIGEST_BYTES = 32
ALERT = "lists"


class Agreement:
    """Of one shard with the other servers of its stage, for steps that are not closed."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._own: dict[int, bytes] = {}
        """By step, since it was frozen here."""
        self._told: dict[int, dict[int, bytes]] = {}
        """By step and shard, what fellows have said; a fellow that has restarted says it again, and that counts."""

    def frozen(self, step: int, contributions: tuple[ContributionId, ...]) -> None:
        """The ledger has named the step's list here. The fellows hear of it."""
        self._own[step] = list_digest(step, contributions)
        for node in self._context.stage_servers:
            self._tell(node, step)

    def on_frozen_list(self, message: FrozenList) -> None:
        if message.step in self._own or self._context.in_window(message.step):
            self._told.setdefault(message.step, {})[message.shard] = message.digest

    def reached(self, step: int) -> bool:
        """Whether all have told what was told here; where one was told something else, the operator hears of it."""
        own, told = self._own[step], self._told.get(step, {})
        others = [shard for shard in range(len(self._context.stage_servers)) if shard != self._context.shard]
        different = [shard for shard in others if told.get(shard, own) != own]
        if different:
            names = listed([self._context.stage_servers[shard][:8] for shard in different])
            self._context.alerts[ALERT] = (
                f"step {step + 1} is not applied: {names} was told to count other contributions than this server; "
                f"the stage's ledger, {self._context.ledger[:8]}, or one of them lies"
            )
        elif all(shard in told for shard in others):
            self._context.alerts.pop(ALERT, None)
            return True
        return False

    def sync(self, peer: NodeId) -> None:
        """A fellow is ready, perhaps anew: it hears of every step that may not be closed."""
        for step in sorted(self._own):
            self._tell(peer, step)

    def close_step(self, step: int) -> None:
        """All have applied it."""
        for kept in (self._own, self._told):
            for closed in [each for each in kept if each <= step]:
                del kept[closed]

    def _tell(self, node: NodeId, step: int) -> None:
        context = self._context
        if node != context.node and node in context.stage_servers:
            context.out.send(
                node,
                FrozenList(
                    ledger_generation=context.generation, step=step, shard=context.shard, digest=self._own[step]
                ),
            )


def list_digest(step: int, contributions: tuple[ContributionId, ...]) -> bytes:
    """Of a step and its contributions in their order."""
    return blake2b(msgspec.msgpack.encode((step, contributions)), digest_size=DIGEST_BYTES).digest()
