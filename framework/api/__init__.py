"""Base classes for users: `TrainModule`, `Callback`, `DataModule`."""
