"""Context parallelism: the ranks of a group share the sequences of a batch."""
