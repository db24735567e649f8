"""Detection of ranks that make no progress: heartbeats, limits, stack dumps."""
