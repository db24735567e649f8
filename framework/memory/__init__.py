"""The memory that a model needs under each strategy, and the memory that is available."""
