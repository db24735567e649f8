"""A backend for ``torch.compile`` that notes its graphs, for tests of what is compiled and how often."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters

GRAPHS: list[Any] = []


def counting(graph: Any, inputs: Any) -> Any:
    """Compile like the backend ``eager``, and note the graph."""
    GRAPHS.append(graph)
    return graph.forward


def num_graphs() -> int:
    """Return the number of different graphs so far."""
    return len({id(graph) for graph in GRAPHS})


def forget_compiled() -> None:
    """Drop all compiled code, the graphs, and the counters of the compiler."""
    torch._dynamo.reset()
    counters.clear()
    GRAPHS.clear()
