"""Value types, errors, the registry and other tables that need nothing else of phalanx."""
