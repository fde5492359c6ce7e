"""The one error that a user of the build meets."""

from __future__ import annotations


class BuildError(Exception):
    """Something an operator can mend.

    Args:
        what: what went wrong, in one sentence, naming the file or the input.
        remedy: what to do about it.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}\n  To do: {remedy}")
        self.what = what
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Pickles whole, so that a worker process hands it over as it is."""
        return type(self), (self.what, self.remedy)
