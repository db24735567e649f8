"""What a model needs of memory under each strategy, and what is there."""
