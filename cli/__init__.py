"""The command ``phalanx``: a thin command-line interface to functions of the library."""
