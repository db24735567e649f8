"""``Fabric``: the machinery of a run as verbs for people's own loops."""
