"""The `Strategy` contract and functions shared by all strategies."""
