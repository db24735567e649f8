"""`Trainer`: settings are checked, a run is assembled, and a stage is executed."""
