"""The checks: each takes a run's evidence and says pass, fail, inconclusive or not-run.

A check never infers: what was not measured is `not-run`, and `not-run` does not pass. Adding a
check: write a function in its family's module, decorate it with its name and what it needs, require
it in a profile, and add a row to the mutation table (tests/eval/test_mutations.py) with a candidate
that only it catches.
"""

from importlib import import_module

from v100_gate.checks.base import CHECKS, Result, beyond_a_url

FAMILIES = (
    "session", "speed", "tokens", "caching", "routes", "memory", "quality", "rolling"
)  # fmt: skip
"""Modules here in the order of a verdict's table; importing one registers its checks."""

for family in FAMILIES:
    import_module(f"{__name__}.{family}")

__all__ = ["CHECKS", "FAMILIES", "Result", "beyond_a_url"]
