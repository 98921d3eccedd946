"""GraphCache: small passes replayed as CUDA graphs, one a bucket.

A pass has some seven hundred launches, which take the host about as long as the device needs for the whole of
a small pass; a replay is one launch.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from d3serve.model.backbone import Backbone, PassInputs
from d3serve.model.buckets import Bucket

MAX_GRAPHS = 96  # each keeps some megabytes of launch parameters; the least recently used goes first


@dataclass(frozen=True)
class _Captured:
    """A graph, the inputs that it reads and the hidden states that it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: PassInputs
    hidden: Tensor


class GraphCache:
    """Runs padded passes of one backbone. For one thread: the graphs share one pool of memory."""

    def __init__(self, backbone: Backbone) -> None:
        """Start with no graph."""
        self._backbone = backbone
        self._captured: OrderedDict[Bucket, _Captured] = OrderedDict()
        self._met: set[Bucket] = set()
        self._pool = torch.cuda.graph_pool_handle()

    def forward(self, bucket: Bucket, inputs: PassInputs) -> Tensor:
        """Run a pass padded to `bucket`; the result is overwritten by the next call.

        A bucket's first pass only compiles what it needs; its second is captured, since it may come again.
        """
        captured = self._captured.get(bucket)
        if captured is None:
            hidden = self._backbone.forward(inputs)
            if bucket in self._met:
                self._captured[bucket] = self._capture(inputs)
                if len(self._captured) > MAX_GRAPHS:
                    self._captured.popitem(last=False)
            self._met.add(bucket)
            return hidden
        self._captured.move_to_end(bucket)
        captured.inputs.copy_(inputs)
        captured.graph.replay()
        return captured.hidden

    def _capture(self, inputs: PassInputs) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        # Other threads copy beside: one of them that waits for its copy must not break the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = self._backbone.forward(inputs)
        return _Captured(graph, inputs, hidden)
