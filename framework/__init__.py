"""Every contract of phalanx, and the way of a batch through them."""
