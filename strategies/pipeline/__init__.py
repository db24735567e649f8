"""Pipelines: the repeated blocks of a model divided over ranks, with the schedules of torch."""
