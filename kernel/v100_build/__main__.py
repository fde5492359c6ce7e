"""Runs the command line: ``python -m v100_build``."""

from .cli import app

app(prog_name="v100_build")
