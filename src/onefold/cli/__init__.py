"""The command line: `jobs` has the options of all commands, and one module per command does the work."""

from onefold.cli.main import main

__all__ = ["main"]
