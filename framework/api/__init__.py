"""What users subclass: `TrainModule`, `Callback`, `DataModule`."""
