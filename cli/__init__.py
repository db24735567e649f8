"""The command ``phalanx``: a thin command-line interface to functions of the library.

``commands.py`` has the arguments of all commands, and a module for each command does its work. The module is imported
when the command runs, see ``command_parser.imported``.
"""
