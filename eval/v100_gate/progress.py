"""What a person sees while a gate runs: a live bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


class Reporter:
    """Overall progress in steps, and the wave being measured with its event count."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(highlight=False)
        self.quiet = quiet
        self.began = time.monotonic()
        self.live: Progress | None = None
        self.total: TaskID | None = None
        self.now: TaskID | None = None
        self.label = ""

    def begin(self, steps: int, title: str) -> None:
        """Start showing progress of `steps` steps."""
        self.began = time.monotonic()
        if self.quiet or not self.console.is_terminal:
            self.note(f"{title}: {steps} steps")
            return
        self.live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self.live.start()
        self.total = self.live.add_task(title, total=steps, unit="steps")
        self.now = self.live.add_task("", total=1, unit="chunks", visible=False)

    def note(self, text: str) -> None:
        """One line that stays."""
        if not self.quiet:
            clock = time.monotonic() - self.began
            self.console.print(f"[{clock:6.1f} s] {text}", markup=False, soft_wrap=True)

    def step(self, label: str, expected: int = 1) -> None:
        """A step begins; `expected` bounds its inner count (tokens or requests)."""
        self.label = label
        if self.live and self.now is not None:
            self.live.update(self.now, description=label, total=expected, completed=0, visible=True)

    def count(self, done: int) -> None:
        """Inner count of the step in progress."""
        if self.live and self.now is not None:
            self.live.update(self.now, completed=done)

    def done(self, text: str | None = None, steps: int = 1) -> None:
        """The step is over; `text` stays on the screen."""
        if self.live and self.total is not None:
            self.live.advance(self.total, steps)
        if text:
            self.note(text)

    def end(self) -> None:
        """Stop the live display."""
        if self.live:
            self.live.stop()
            self.live = None
