"""``phalanx migrate``: scripts and configurations of other frameworks are rewritten for phalanx.

A file is read with libcst, which keeps positions, comments and scopes; what changes is a list of edits of its text, so
that everything else stays as it is, byte by byte. libcst is an optional package: this package is imported after the
command has checked that it is installed.
"""
