"""Errors of the patch tool. Each says what is wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence


class PatchToolError(Exception):
    """Anything the operator or the author of a patch has to act on."""

    def __init__(self, problem: str, todo: str) -> None:
        """`problem` says what is wrong and where, `todo` the next step."""
        super().__init__(f"{problem}\n  what to do: {todo}")
        self.problem = problem
        self.todo = todo


class HunkError(PatchToolError):
    """A hunk that does not fit the file, with the lines that were expected and found."""

    def __init__(
        self,
        *,
        patch: str,
        file: str,
        hunk: int,
        hunks: int,
        header: str,
        line: int,
        expected: Sequence[str],
        found: Sequence[str],
        todo: str,
    ) -> None:
        """`hunk` counts from 1; `line` is the 1-based line where the hunk has to match."""
        self.patch = patch
        self.file = file
        self.hunk = hunk
        self.line = line
        self.expected = list(expected)
        self.found = list(found)
        rows = [
            f"patch {patch} does not apply",
            f"  file: {file}",
            f"  hunk: {hunk} of {hunks}: {header}",
            "  the tree differs from what the hunk expects ('!' marks the lines that differ):",
        ]
        for offset in range(max(len(self.expected), len(self.found))):
            want = self.expected[offset] if offset < len(self.expected) else None
            have = self.found[offset] if offset < len(self.found) else None
            number = line + offset
            if want == have:
                rows.append(f"    {number:6d}            | {_shown(want)}")
            else:
                rows.append(f"  ! {number:6d}  expected  | {_shown(want)}")
                rows.append(f"  ! {number:6d}  found     | {_shown(have)}")
        super().__init__("\n".join(rows), todo)


def _shown(line: str | None) -> str:
    if line is None:
        return "(no line: end of the file or of the hunk)"
    if not line.endswith("\n"):
        return line + "  (no newline at the end of the file)"
    return line[:-1].replace("\r", "\\r")
