"""`Fabric`: the verbs for a training loop that the user writes."""
