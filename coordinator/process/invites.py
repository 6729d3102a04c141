"""Invites: the two links that a coordinator prints, which stay the same across restarts, and those that are asked for.

The printed ones admit many computers, so whoever has one can come again under a new name: they are for runs among
people who know each other. An invite that works once lets in one computer, and a ban of that computer ends it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from coordinator.process.store import Store, StoredInvite
from protocol.trust.identity import Identity
from protocol.trust.membership import NONCE_BYTES, Invite, JoinLink, JoinRole, sign_statement

INVITE_S = 30 * 86400
"""Life of an invite: people set up their machines within days, and a link that leaked does not count for ever."""
RENEW_S = 86400
"""An invite that runs out sooner than this is not printed any more."""
VOLUNTEER_USES = 10_000
"""Volunteers that one link admits: it is meant to be published."""
SERVER_USES_PER_PLACE = 4
"""Servers that one link admits for each place of the plan: a first one, spares, and one that lost its key."""


def join_links(
    store: Store, identity: Identity, addresses: Sequence[str], server_places: int, wall_s: float
) -> dict[JoinRole, JoinLink]:
    """The link of each role; makes and keeps a new invite where none is left that is good for another day and for
    all places (a run that nobody has joined may have got more of them)."""
    uses: dict[JoinRole, int] = {"server": SERVER_USES_PER_PLACE * server_places, "volunteer": VOLUNTEER_USES}
    usable: dict[JoinRole, StoredInvite] = {}
    for invite in store.invites():
        good = not invite.closed and invite.not_after > wall_s + RENEW_S
        if good and invite.spent < invite.uses >= uses[invite.role]:
            usable[invite.role] = invite
    links: dict[JoinRole, JoinLink] = {}
    for role, count in uses.items():
        if role not in usable:
            usable[role] = new_invite(store.run_id, identity, role, count, wall_s)
            store.add_invite(usable[role])
        links[role] = JoinLink(tuple(addresses), usable[role].signed)
    return links


def new_invite(
    run_id: bytes, identity: Identity, role: JoinRole, uses: int, wall_s: float, life_s: float = INVITE_S
) -> StoredInvite:
    """A signed invite for so many different computers; it counts once it is in the database."""
    statement = Invite(
        issuer=identity.public_key,
        run_id=run_id,
        role=role,
        uses=uses,
        not_after=int(wall_s + life_s),
        nonce=os.urandom(NONCE_BYTES),
    )
    signed = sign_statement(statement, identity)
    return StoredInvite(statement.nonce, role, uses, statement.not_after, signed, spent=0)
