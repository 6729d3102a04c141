"""What a run decides about its links."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.base.limits import ELEMENTS_MAX, SEND_QUEUE_BYTES, TENSOR_BYTES_MAX, WINDOW_BYTES


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Bounds that the run decides."""

    tensor_bytes_max: int = TENSOR_BYTES_MAX
    """The largest tensor that can honestly occur."""
    window_bytes: int = WINDOW_BYTES
    """Tensor bytes of one peer under way or undigested; at least the largest message."""
    send_queue_bytes: int = SEND_QUEUE_BYTES
    """Messages and tensors that wait for one peer; above it the link is closed."""
    elements_max: int = ELEMENTS_MAX
    """Values of the largest tensor that can honestly occur."""

    def allows(self, other: LinkOptions) -> bool:
        """Whether a link that was opened under these carries whatever `other` lets pass."""
        return (
            self.tensor_bytes_max >= other.tensor_bytes_max
            and self.window_bytes >= other.window_bytes
            and self.elements_max >= other.elements_max
        )
