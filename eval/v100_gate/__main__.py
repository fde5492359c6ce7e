"""`python -m v100_gate`: see cli.py."""

from v100_gate.cli import app

if __name__ == "__main__":
    app(prog_name="python -m v100_gate")
