"""Every bound of the wire, each with its reason. What goes beyond one is refused before it costs anything.

Bounds that a run decides (largest tensor, window) are handed to `protocol.link.framing.FramingLimits`; here are the
fixed ones, on which two implementations must agree.
"""

from __future__ import annotations

# ---- handshake --------------------------------------------------------------------------------------------------

CREDENTIAL_BYTES_MAX = 2048
"""A membership takes about 180 bytes; what a stranger may make us check a signature over stays small."""
HANDSHAKE_S = 5.0
"""A handshake takes two round trips and a millisecond; who needs longer holds a half-open place for nothing."""
HALF_OPEN_MAX = 64
"""Handshakes going on at once; each costs about 4 KiB and, at its end, half a millisecond of processor."""
HALF_OPEN_PREFIX_MAX = 4
"""Of these from one address prefix (IPv4 /24, IPv6 /48), so that one network cannot take all places."""
HALF_OPEN_PROVEN_MAX = 256
"""The same for callers that have shown a cookie: 64 networks' share, 1 MiB in all. A flood from so many networks at
300 calls a second leaves a handshake its place for as long as it takes, since a crowded network gives way first."""
CALLS_PER_S = 10.0
"""Calls that one network may make: answering one costs 0.66 ms of processor, so a network takes 0.7 % at most …"""
CALLS_BURST = 40.0
"""… and a household of eight computers that starts up makes about 16 at once: two for each handshake when crowded."""
BACK_OFF_FIRST_S = 0.5
"""A member whose link was ended for a fault of its own may not come again for so long, then for twice as long …"""
BACK_OFF_MAX_S = 60.0
"""… up to this: somebody who does nothing else gets in 8 times in the first minute and then once a minute, where it
got in as often as it called. A link that broke, a time-out or a crowd is no fault, and nobody waits for one."""
BACK_OFF_FORGOTTEN_S = 180.0
"""Three quiet minutes after its waiting was over, a member begins at the first step again."""
BACK_OFF_NODES_MAX = 4096
"""Members that this is remembered of, 200 bytes each, and the newest faults count: at six new members a minute one
network needs eleven hours for so many."""
FAULTS_PER_S = 1.0
"""Faults that one network is forgiven, and dials of members that should wait: 1 ms of processor each at most. A
handshake takes one and gives it back when no fault comes of it, so honest neighbours are in the way of nobody …"""
FAULTS_BURST = 16.0
"""… and so many at once: four times the handshakes that a network has under way (`HALF_OPEN_PREFIX_MAX`). Beyond them
its calls are closed before a word is read, and 16 quiet seconds make all good."""
LOCAL_FAULTS_PER_S = 4.0
"""The same for a private address and for this computer itself, where a whole laboratory may stand behind a router …"""
LOCAL_FAULTS_BURST = 320.0
"""… of all handshakes that can be under way (`HALF_OPEN_MAX`, `HALF_OPEN_PROVEN_MAX`): two hundred members that come
back at once after a restart never meet it."""
LINKS_PREFIX_MAX = 8
"""Links of volunteers from one network that one daemon holds: with it a /24 is no crowd of a thousand identities. A
private address counts alone, so a laboratory may have any number of computers."""
JOINS_PER_S = 0.1
"""New members that may come from one network, six a minute …"""
JOINS_BURST = 6.0
"""… and so many at once."""
LOCAL_JOINS_PER_S = 1.0
"""The same from this computer or a private address, where a demo or a laboratory starts twenty at once …"""
LOCAL_JOINS_BURST = 64.0
"""… as against the 600 in 5.5 s that were once possible."""
COOKIE_ABOVE = 32
"""Half-open handshakes above which a caller must first show that it hears us at its address."""
COOKIE_S = 120.0
"""A cookie is good for one to two of these periods: long enough for any redial."""

# ---- records and frames -------------------------------------------------------------------------------------------

RECORD_BYTES_MAX = 65536
"""Plain bytes of one record: a control message waits for at most one of them (0.12 s at 20 Mbit/s, all queues
included, against 0.33 s for 1 MiB; transport.md section 1)."""
MESSAGE_BYTES_MAX = 640 << 10
"""A whole encoded message: the largest real one, 8,192 contributions, fits; decoding takes under 10 ms of the loop."""
HEADER_BYTES_MAX = 65000
"""An encoded message that has tensors: it travels in one record, before its chunks."""
REKEY_BYTES = 1 << 30
"""Bytes under one key of a direction: far below any bound of the cipher, often enough to limit what a leak shows."""
REKEY_S = 3600.0
"""Or this long, whichever comes first."""
KEPT_BYTES_MAX = 64 << 20
"""Sent and not acknowledged, kept in case the path breaks: a gigabit over half a second. Mostly parts of tensors that
are kept anyway; beyond it a sender waits for the receiver's ACK."""
KEPT_FRAMES_MAX = 16384
"""The same for small frames: of 200 bytes each these are 3 MB."""
ACK_FRAMES = 64
"""The receiver acknowledges after so many frames …"""
ACK_BYTES = 512 << 10
"""… or after so many bytes, or with its next PING: an ACK costs 30 bytes."""
OPEN_BULK_MAX = 8
"""Messages with tensors that may be under way on one link at once: enough to share a line, few enough to finish."""
TENSORS_MAX = 64
"""Tensors of one message."""
DIMENSIONS_MAX = 8
"""Dimensions of one tensor."""
WINDOW_BYTES = 64 << 20
"""Tensor bytes that a peer may have under way or undigested, unless one tensor of the run needs more."""
BUDGET_BYTES = 2 << 30
"""Of all links of a process together, where its owner says nothing else: the windows of 32 peers. A node takes half of
the memory that is free when it starts."""
TENSOR_BYTES_MAX = 64 << 20
"""One tensor, unless the run says otherwise."""
ELEMENTS_MAX = 64 << 20
"""Values of one tensor, unless the run says otherwise: as many as fill TENSOR_BYTES_MAX with a byte each. Bytes alone
do not bound them: 64 packed integers that are all zero take 5 bits, so 64 MiB may claim to be 6.9 G values."""
MESSAGE_PARTS_MAX = 4
"""All tensors of a message hold so many times that at most: parameters come as three changes and a grid."""

# ---- messages -----------------------------------------------------------------------------------------------------

TASKS_MAX = 16384
"""Tasks in one list (`Held` of all open steps): four open steps of 4,096 microbatches."""
CONTRIBUTIONS_MAX = 8192
"""Contributions in one list: one for each microbatch of the largest step, twice."""
ITEMS_MAX = 4096
"""Items of any other list."""
TEXT_MAX = 256
"""Characters of a text: reasons, addresses, digests, build ids."""
PATH_MAX = 4096
"""Characters of a path in the run's configuration (PATH_MAX of Linux)."""
PUBLIC_NAME_MAX = 64
"""Characters of a public name, and of a run's (63)."""
CURVE_MAX = 64
"""Points of the loss curve that volunteers are sent, 11 bytes each: a screen shows no more. With a sample of 256
characters and the signed thanks a piece of news has 1.5 kB, every half minute: 50 bytes a second for each volunteer."""
BYTES_MAX = CREDENTIAL_BYTES_MAX
"""A byte string inside a message: digests (32) and memberships."""
NUMBER_MAX = 2**63 - 1
"""Largest whole number: what SQLite and a signed 64-bit tensor hold."""
SPANS_PIECE = 1024
"""Spans of one answer, 32 bytes each: a control message behind them waits 13 ms on a line of 20 Mbit/s, 0.13 s at 2."""
ADDRESSES_MAX = 8
"""Addresses of one node: host interfaces, a name, a relay."""
COPIES_MAX = 16
"""Copies that a server names: versions of one shard that may be asked for, two or three of them."""
JOIN_CHECKPOINTS_MAX = 16
"""Checkpoints that a node names when it joins; a run keeps three unless told otherwise."""
LINKS_MAX = 1024
"""Links of one report: a server has 256 volunteers unless its run says otherwise, and its fellows."""
FELLOWS_MAX = 64
"""Servers that one server measures before the first plan: 63 links of half a megabyte each way are 64 MB, what one
measures for others at once (`MEASURE_TOTAL_BYTES`)."""
RELAYS_MAX = 8
"""Spare servers named to one node as relays: an attempt tries four, and some of them may be full."""

# ---- measuring ----------------------------------------------------------------------------------------------------

MEASURE_PIECE_BYTES = 32 << 10
"""One piece: a third of a second on a line of 0.8 Mbit/s, so that even a slow line sees a few within the time."""
MEASURE_BYTES = 2 << 20
"""Each way and link, at most: fills 100 Mbit/s for 170 ms, which is past the start of a connection at 50 ms round
trip."""
MEASURE_ENOUGH_BYTES = 256 << 10
"""Arrived each way: no more is begun if these have taken …"""
MEASURE_ENOUGH_TRIPS = 8
"""… so many round trips, in which a sender that doubles what it has under way has come to 512 pieces, more than any
measurement has. A home line and a local network are known after a fourth of `MEASURE_BYTES`; a demo of 20 steps moved
50 MB only for measuring, a quarter of all it moved."""
MEASURE_S = 3.0
"""A whole measurement of a link, both ways."""
MEASURE_PEER_BYTES = 4 * MEASURE_BYTES
"""What one peer may move at once by measuring; grows back by …"""
MEASURE_PEER_BYTES_PER_S = 32 << 10
"""… so much, which is a measurement each way every two minutes."""
MEASURE_TOTAL_BYTES = 64 << 20
"""The same for all peers of a node together: a burst of sixteen that join …"""
MEASURE_TOTAL_BYTES_PER_S = 1 << 20
"""… and then one in four seconds: 8 Mbit/s at most of a server's line."""
SIGNALS_PER_S = 20.0
"""Signals of one node that the coordinator carries: reaching a peer takes about four …"""
SIGNALS_BURST = 200.0
"""… and a node that starts reaches for every server of its stage at once."""

# ---- drivers ------------------------------------------------------------------------------------------------------

READ_BYTES = 256 << 10
"""One read of a socket; deciphering it takes under a millisecond of the loop."""
WRITE_BYTES = 128 << 10
"""Records handed to a socket at once: what a control message may find before itself in our own process."""
UNSENT_BYTES = 128 << 10
"""Bytes in the kernel that were not sent yet, above which the socket takes no more (TCP_NOTSENT_LOWAT)."""
AHEAD_S = 0.015
"""Both of these shrink on a slow line to so much of its measured rate: what a control message waits for is time."""
AHEAD_BYTES_MIN = 16 << 10
"""… but not below this: the kernel has to have something to send while we are asleep."""
SEND_QUEUE_BYTES = 1 << 30
"""Messages and tensors that wait for one peer; above it the peer is too slow and its link is closed. A run with large
parts sets a larger bound (`LinkOptions.send_queue_bytes`)."""
PROGRESS_BYTES = 16 << 10
"""A peer in the middle of a frame or a tensor must bring at least this much …"""
PROGRESS_S = 10.0
"""… in this time; slower ones hold memory for nothing."""
SEND_STALL_S = 30.0
"""WRITE_BYTES not taken by a peer in this time: 4 KB/s is no link to train on."""
CONNECT_S = 5.0
"""To reach one address of a peer, and to look up a name."""
CONNECT_STAGGER_S = 0.25
"""The start that one address has over the next one (RFC 8305, section 5)."""
CONNECT_CANDIDATES_MAX = 16
"""Addresses tried for one peer: ADDRESSES_MAX of both families; a name may stand for any number."""
KEEP_ALIVE_S = 1.0
"""Nothing said for so long: a PING. Two packets a second and link, 150 bytes with all headers."""
QUESTIONS_PER_S = 64.0
"""PINGs that a peer may ask on a link, 64 times what an honest one does: reading and answering one takes 6 us …"""
QUESTIONS_BURST = 1024.0
"""… and so many at once: what an honest one asks in a quarter of an hour in which we did not read."""
ROUND_TRIP_S = 5.0
"""A busy link measures its round trip so often."""
SILENT_S = 3.5
"""Nothing heard for so long, where something comes every KEEP_ALIVE_S: three were lost in a row, so look for another
path. A path with 1 % loss does this by chance once in a million seconds and more."""
GRACE_S = 3.0
"""A link whose carrier has failed lives so long without a path: to find another takes one or two seconds."""
MEND_BYTES = 4 << 20
"""A TCP connection that breaks mostly says that its process has gone, so its link ends at once, and others get its work
without waiting. Not with so much under way, which a home line (20 Mbit/s) would need 1.7 s and more to send again."""
CLOSE_S = 2.0
"""For the last messages and the clean end of a link, after that it is cut."""
INBOX_MAX = 1024
"""Facts waiting for a machine, above which the network is read no further."""

# ---- words --------------------------------------------------------------------------------------------------------

REJECT_REASONS = (
    "signature",  # a signature, a tag of the cipher or the order of records is wrong
    "size",  # longer, shorter or more than a bound of this file
    "version",  # another protocol version, or work of another ledger generation
    "replay",  # our own messages or key sent back to us, or a number used twice
    "decode",  # not a message, or not in its one canonical form
    "role",  # a message that this role may not send to that one
    "unexpected",  # a message that this role may send, but not now or not with this content
    "run",  # another run
    "identity",  # not the node that was dialled
    "credential",  # no invite or membership, or an expired, revoked or spent one
    "shape",  # a tensor whose shape, form or byte count cannot be
    "not_finite",  # NaN or infinity where a number is needed
    "timeout",  # too slow in the handshake or within a frame
    "busy",  # too many half-open handshakes, links, messages or questions
)
"""Values of the label `reason` of barnraise_transport_rejected_messages_total."""

REPORT_COUNTERS = (
    # A server's machine: where it stands.
    "step",
    "opened",
    "reached",
    "generation",
    "version",
    "volunteers",
    "queue",
    "leased",
    "reissued",
    "unreported",
    "stalled_s",
    "audits_passed",
    "audits_blamed",
    "audits_missed",
    # A volunteer's machine: what it did.
    "microbatches",
    "tokens",
    "accepted",
    "rejected",
    "validated",
    "leases",
    "unsent_tasks",
    # The driver: where the time went, and what crossed the wire.
    "tasks_forward",
    "tasks_backward",
    "tasks_recomputed",
    "compute_s",
    "codec_s",
    "optimizer_s",
    "input_wait_s",
    "transfer_wait_s",
    "rejected_messages",
    "relay_sessions",
    "relay_bytes",
    # Where it answers /metrics: at the address that its link comes from, or to its own machine only.
    "metrics_port",
    "metrics_loopback_port",
    *(
        f"bytes_{direction}_{kind}"
        for direction in ("rx", "tx")
        for kind in ("activation", "gradient", "weights", "measuring", "control", "checkpoint", "data")
    ),
)
"""Keys of `NodeReport.counters`; a report may leave some out, and holds no others."""
