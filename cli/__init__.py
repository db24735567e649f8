"""The command ``phalanx``: a thin face, without logic that a user of the library would miss."""
