"""The passes of an optimizer step: windows of micro-batches, and the weights of their losses."""
