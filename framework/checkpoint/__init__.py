"""The store of checkpoints: atomic, verified, the same under every strategy. Nothing in it pickles or unpickles.

A checkpoint is a directory of safetensors files and a ``manifest.json``; the page "The checkpoint format" of the docs
describes every byte. Strategies write with ``save`` and read slices through ``open_checkpoint``. What users call is
gathered in ``phalanx.checkpoint``.
"""
