"""The gate: measures a candidate release against a control and says whether it may be served.

Start reading at `cli.py` (the commands), then `runner.py` (what happens in what order),
`metrics.py` (what the figures mean) and `checks/` (what passes). docs/gate.md is the manual.
"""

__version__ = "1.0.0"

RESULT_SCHEMA = 1
"""Version of everything written below `results/<run>/`; a reader refuses another one."""
