"""Errors of the emulator and the cycle model."""


class SimError(RuntimeError):
    """A launch that cannot run or went wrong; the message names kernel, address and instruction."""


class UnknownInstruction(SimError):
    """An instruction, modifier or operand form that the translator does not know."""
