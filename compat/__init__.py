"""Aliases under which programs written for other frameworks run with their import lines changed.

``phalanx.compat.lightning`` stands in for ``lightning``, ``lightning.pytorch`` and ``pytorch_lightning``,
``phalanx.compat.accelerate`` for ``accelerate``.
"""
