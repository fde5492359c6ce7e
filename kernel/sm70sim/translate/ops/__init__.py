"""Translations of the opcodes, one module per family; importing them registers them."""

from . import control, convert, floating, half, integer, lanes, memory

__all__ = ["control", "convert", "floating", "half", "integer", "lanes", "memory"]
