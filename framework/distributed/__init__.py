"""The ranks of a run: rendezvous, process groups, collectives, and the control reduction of a step."""
