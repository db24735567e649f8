"""Sharding by torch's ``fully_shard``, alone or beside tensor parallelism."""
