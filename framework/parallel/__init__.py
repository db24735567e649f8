"""The `Strategy` contract and what all strategies share."""
