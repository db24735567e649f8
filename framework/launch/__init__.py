"""Starting, supervising, signalling and ending ranks."""
