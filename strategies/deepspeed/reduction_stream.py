"""The CUDA stream on which stage 3 reduces gradients, without the waiting of the host at the end of each backward pass.

DeepSpeed 0.19.8 makes the host wait for this stream before it uses the reduced gradients. All it does with them is to
queue further work on the device, so that it is enough if the current stream waits. Gradients that are offloaded are
read by the host: there the stream stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch


class OrderedStream(torch.cuda.Stream):
    """A stream whose ``synchronize`` makes the current stream wait for it, and not the host."""

    @classmethod
    def of(cls, stream: torch.cuda.Stream) -> OrderedStream:
        """Return another object for the same stream."""
        return cls(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    def synchronize(self) -> None:
        """Let work that is queued on the current stream from now on begin after the work of this stream."""
        torch.cuda.current_stream(self.device).wait_stream(self)

    def follow(self) -> None:
        """Let work that is queued on this stream from now on begin after the work of the current stream."""
        self.wait_stream(torch.cuda.current_stream(self.device))


def order_reductions(zero: Any) -> OrderedStream | None:
    """Replace the stream of an optimizer of stage 3; return the new one, or None where the host has to wait."""
    stream = zero.reduce_and_partition_stream
    if zero.offload_optimizer or not isinstance(stream, torch.cuda.Stream):
        return None
    ordered = OrderedStream.of(stream)
    zero.reduce_and_partition_stream = ordered
    return ordered
