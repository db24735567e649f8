"""The process that builds DeepSpeed's ops for the device, in the background while other groups are measured."""

from __future__ import annotations

import json
import sys

from phalanx.strategies.deepspeed.arguments import resolve_options
from phalanx.strategies.deepspeed.build import ensure_ops
from phalanx.strategies.deepspeed.ops import needed_ops

from .channel import Parent


def main() -> None:
    parent = Parent()
    device = json.loads(sys.argv[1])["device"]
    ops = needed_ops(resolve_options(stage=2), device)
    ensure_ops(ops, print, device)
    parent.send({"ops": ops})


if __name__ == "__main__":
    main()
