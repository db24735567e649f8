"""Value types, errors, the registry and tables: the modules that import nothing else from phalanx."""
