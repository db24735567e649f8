"""What `self.log` records, how it is reduced over steps and ranks, and the `Logger` contract."""
