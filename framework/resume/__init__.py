"""What of a run is saved, when it is saved, and how it is restored."""
