"""Sharding with torch's ``fully_shard``, optionally combined with tensor parallelism."""
