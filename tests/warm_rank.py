"""A warm rank: what ``ranks.run_on_ranks`` starts with its number, the number of ranks and the store's port."""

from __future__ import annotations

import os
import sys

import ranks

if __name__ == "__main__":
    pipe, store = int(os.environ.pop("RANK_PIPE")), int(os.environ.pop("RANK_STORE", "-1"))
    rank, num_ranks, port = map(int, sys.argv[1:4])
    # To what runs here this is no script that could be started again, as in a test or a notebook.
    del __file__
    ranks.serve(rank, num_ranks, port, sys.argv[4], store, pipe)
