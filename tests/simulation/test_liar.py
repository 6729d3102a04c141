"""Liars of a world stay within what can be seen: where nobody reliable computes, no two of them bring something absurd
for the same task; where servers do, they agree on it."""

from __future__ import annotations

from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.base.machine import Send
from protocol.messages import Contribute
from tests.simulation.host import Host
from tests.simulation.liar import Liar
from tests.simulation.scene import Scene
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.world import Watcher


def is_absurd(host: Host, microbatch: int) -> bool:
    """Whether the liar makes its contribution to a microbatch a huge one."""
    assert isinstance(host.machine, Liar)
    task = TaskId(0, microbatch, 0, "B")
    (ref,) = host.machine.tensor((3,), value=(1, 2, 3))
    message = Contribute(
        ledger_generation=1,
        contribution=ContributionId(host.node, 1, microbatch),
        step=0,
        version=0,
        tasks=(task,),
        losses=(),
        tickets=(),
        shard=0,
        tensors=(ref,),
    )
    sent = host.machine._absurd(Send(NodeId("s1"), message))
    assert isinstance(sent, Send) and isinstance(sent.message, Contribute)
    return sent.message.square_norm == float("inf")


def test_no_liar_confirms_what_another_has_made_up() -> None:
    """Two that bring the like are believed, so a false sum would count, and the world's judges would be wrong."""
    swarm = Swarm(1, Shape(collocated="never"), Watcher(), Scene(lies=("absurd",)))
    one, other = swarm.add_liar(), swarm.add_liar()
    swarm.world.run(1.0)
    lied = [microbatch for microbatch in range(100) if is_absurd(one, microbatch)]
    assert lied and not any(is_absurd(other, microbatch) for microbatch in lied)


def test_a_liar_that_starts_anew_does_not_repeat_itself() -> None:
    """Who insists is believed as well."""
    swarm = Swarm(1, Shape(collocated="never"), Watcher(), Scene(lies=("absurd",)))
    liar = swarm.add_liar()
    swarm.world.run(1.0)
    lied = [microbatch for microbatch in range(100) if is_absurd(liar, microbatch)]
    swarm.world.crash(liar)
    swarm.world.start(liar)
    assert liar.machine is not None
    assert lied and not any(is_absurd(liar, microbatch) for microbatch in lied)


def test_liars_conspire_where_servers_compute() -> None:
    """What one has made up, the other brings as well: only a server's opinion stands against two."""
    swarm = Swarm(1, Shape(), Watcher(), Scene(lies=("absurd",)))
    one, other = swarm.add_liar(), swarm.add_liar()
    swarm.world.run(1.0)
    lied = [microbatch for microbatch in range(100) if is_absurd(one, microbatch)]
    assert 0 < len(lied) < 100 and all(is_absurd(other, microbatch) for microbatch in lied)
