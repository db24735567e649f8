"""Training and evaluation data: sharding over ranks, order, position for resume, the accumulation window."""
