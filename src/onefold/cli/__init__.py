"""The command line: one module per command, and the jobs behind the commands for people's own files."""

from onefold.cli.main import main

__all__ = ["main"]
