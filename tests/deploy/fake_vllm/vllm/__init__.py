"""Fake vLLM of the deployment tests; see cli.py."""
