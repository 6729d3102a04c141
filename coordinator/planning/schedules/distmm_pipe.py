"""DistMM-Pipe: two modalities side by side that meet in one contrastive loss (Huang et al. 2024).

The loss compares a group of texts with a group of images, so a registered operation `sync` gathers the
outputs of both: it is the paper's example of a new instruction with its dependencies (FlexPipe, Figure 6).
"""

from __future__ import annotations

from coordinator.planning.schedules.design import Design
from protocol.base.errors import BadInputError
from protocol.schedule.ir import Key, Op


def design(stages: int, microbatches: int, group: int = 2) -> Design:
    """Text on the first half of the nodes, images on the second; `group` microbatches share a loss.

    Each modality has its own order: texts, being short, prefer forwards; images free memory first.
    """
    if stages < 2 or microbatches % group:
        raise BadInputError(f"microbatches: groups of {group} on two modalities need a multiple and two nodes")
    half = stages // 2
    text = Design.of(half, microbatches).order("forward").in_flight(lambda node: half - node + 2 * group - 1)
    image = Design.of(stages - half, microbatches).order("backward")
    image = image.in_flight(lambda node: stages - half - node + 2 * group - 1)
    both = text.add(image)

    def members(place: Key) -> list[Key]:
        """The last forwards of both modalities that share this one's loss."""
        first = place.microbatch % microbatches // group * group
        return [
            Key(Op.F, shift + first + number, depth - 1)
            for shift, depth in ((0, half), (microbatches, stages - half))
            for number in range(group)
        ]

    outputs = [Key(Op.F, flow.microbatch, len(flow.route) - 1) for flow in both.flows]
    return both.register("sync", outputs, after=members, before=lambda place: [place._replace(op=Op.B)])
