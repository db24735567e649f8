"""The canonical state of live modules and optimizers, and averages of weights."""
