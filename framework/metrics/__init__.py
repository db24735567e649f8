"""Metrics: recording by `self.log`, reduction over steps and ranks, and the `Logger` contract."""
