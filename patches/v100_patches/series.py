"""The series as data: which patches there are, in which order, and what each says of itself.

    base.toml     the wheels that the series applies to, by version and SHA-256
    series        one line per patch: GROUP FILE
    NNNN-*.patch  header (Subject, What, Why, Tests, Upstream), a line '---', a unified diff
    series.lock   written by `refresh`: SHA-256 of each patch and of each patched tree

Groups say which wheel a patch goes into: `core` into both flavours, `cuda` and `cpu` only into
the wheel of that name. `core` comes first and the other two do not see each other, so that a
patch finds the same lines whichever flavour is built.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from unidiff import PatchSet
from unidiff.constants import LINE_TYPE_NO_NEWLINE
from unidiff.errors import UnidiffParseError

from v100_patches.errors import PatchToolError

FLAVOURS = ("cuda", "cpu")
GROUPS = ("core", *FLAVOURS)
NUMBERS = {"core": range(1, 900), "cuda": range(100, 900), "cpu": range(900, 1000)}
"""Numbers of each group's patches: files are ordered by number, and groups by this table."""
FIELDS = ("Subject", "What", "Why", "Tests", "Upstream")
NAME = re.compile(r"^(?P<number>\d{4})-[a-z0-9]+(-[a-z0-9]+)*\.patch$")
SEPARATOR = "---"
ROOT = "vllm/"

SERIES_DIR = Path(__file__).resolve().parents[1] / "v0.19.1"


@dataclass(frozen=True)
class Hunk:
    """One hunk. Lines keep their line ends; `ops` pairs ' ', '-' or '+' with a line."""

    header: str
    source_start: int
    target_start: int
    ops: tuple[tuple[str, str], ...]

    @property
    def source(self) -> list[str]:
        """The lines that have to be in the file: context and removed ones."""
        return [line for op, line in self.ops if op != "+"]

    @property
    def target(self) -> list[str]:
        """The lines that the file holds afterwards."""
        return [line for op, line in self.ops if op != "-"]

    @property
    def source_index(self) -> int:
        """0-based index of the first source line (unified diff counts an empty side from 0)."""
        return self.source_start - 1 if self.source else self.source_start

    @property
    def target_index(self) -> int:
        """0-based index of the first target line."""
        return self.target_start - 1 if self.target else self.target_start


@dataclass(frozen=True)
class FileDiff:
    """What one patch does to one file. `kind` is 'modify', 'add' or 'remove'."""

    path: str
    kind: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """One patch of the series."""

    group: str
    path: Path

    @property
    def name(self) -> str:
        """File name, which is how the patch is addressed everywhere."""
        return self.path.name

    @cached_property
    def data(self) -> bytes:
        """The file's bytes."""
        return self.path.read_bytes()

    @property
    def sha256(self) -> str:
        """SHA-256 of the patch file."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def _parts(self) -> tuple[str, str]:
        lines = self.data.decode("utf-8").split("\n")
        if SEPARATOR not in lines:
            raise PatchToolError(
                f"patch {self.name} has no line '{SEPARATOR}' between its header and its diff",
                "write the header as docs/patches.md shows, then the separator, then the diff",
            )
        at = lines.index(SEPARATOR)
        return "\n".join(lines[:at]), "\n".join(lines[at + 1 :])

    @property
    def header_text(self) -> str:
        """Everything above the separator."""
        return self._parts[0]

    @cached_property
    def fields(self) -> dict[str, str]:
        """Header fields by name; text may run over several lines."""
        fields: dict[str, list[str]] = {}
        current: list[str] | None = None
        for line in self.header_text.split("\n"):
            match = re.match(r"^([A-Z][A-Za-z-]*):(.*)$", line)
            if match and match.group(1) in FIELDS:
                current = fields.setdefault(match.group(1), [])
                current.append(match.group(2).strip())
            elif current is not None:
                current.append(line.strip())
        return {name: "\n".join(lines).strip() for name, lines in fields.items()}

    @cached_property
    def files(self) -> tuple[FileDiff, ...]:
        """The parsed diff; raises PatchToolError when it is damaged."""
        try:
            parsed = PatchSet.from_string(self._parts[1])
        except UnidiffParseError as error:
            raise PatchToolError(
                f"patch {self.name} is not a well-formed unified diff: {error}",
                "do not edit hunks by hand; edit a tree and run "
                f"`python -m v100_patches refresh {self.name} --tree TREE`",
            ) from error
        return tuple(self._file_diff(entry) for entry in parsed)

    def _file_diff(self, entry) -> FileDiff:
        kind = "add" if entry.is_added_file else "remove" if entry.is_removed_file else "modify"
        path = entry.path
        if entry.is_rename or entry.is_binary_file:
            raise PatchToolError(
                f"patch {self.name}, file {path}: renames and binary files are not supported",
                "express the change as text: remove one file and add the other",
            )
        if not path.startswith(ROOT) or ".." in Path(path).parts:
            raise PatchToolError(
                f"patch {self.name} touches {path}, which is outside {ROOT}",
                f"patch only files of the package {ROOT}",
            )
        return FileDiff(path, kind, tuple(_hunk(hunk) for hunk in entry))


def _hunk(hunk) -> Hunk:
    ops: list[tuple[str, str]] = []
    for line in hunk:
        if line.line_type == LINE_TYPE_NO_NEWLINE:
            op, text = ops[-1]
            ops[-1] = (op, text.removesuffix("\n"))
        else:
            ops.append((line.line_type, line.value))
    counts = f"-{hunk.source_start},{hunk.source_length} +{hunk.target_start},{hunk.target_length}"
    header = f"@@ {counts} @@ {hunk.section_header}".rstrip()
    return Hunk(header, hunk.source_start, hunk.target_start, tuple(ops))


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel: what the series applies to."""

    flavour: str
    distribution: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Series:
    """The whole series of one vLLM version."""

    directory: Path
    version: str
    wheels: dict[str, Wheel]
    patches: tuple[Patch, ...]

    def for_flavour(self, flavour: str) -> Iterator[Patch]:
        """The patches that go into one flavour's wheel, in order."""
        if flavour not in FLAVOURS:
            raise PatchToolError(
                f"unknown flavour '{flavour}'", f"use one of: {', '.join(FLAVOURS)}"
            )
        return (patch for patch in self.patches if patch.group in ("core", flavour))

    def get(self, name: str) -> Patch:
        """The patch of this file name (or of this four-digit number)."""
        for patch in self.patches:
            if name in (patch.name, patch.name[:4]):
                return patch
        raise PatchToolError(
            f"{self.directory / 'series'} has no patch '{name}'",
            "see `python -m v100_patches list`, or start one with `new`",
        )


def load(directory: Path = SERIES_DIR) -> Series:
    """Reads base.toml and series; raises PatchToolError naming the file and line at fault."""
    base_path, series_path = directory / "base.toml", directory / "series"
    for path in (base_path, series_path):
        if not path.is_file():
            raise PatchToolError(f"{path} is missing", "name a series folder with --series-dir")
    try:
        base = tomllib.loads(base_path.read_text("utf-8"))
        wheels = {
            flavour: Wheel(flavour, **{k: entry[k] for k in ("distribution", "file", "sha256")})
            for flavour, entry in base["wheel"].items()
        }
        version = base["version"]
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise PatchToolError(
            f"{base_path} is damaged: {error!r}", "compare it with the committed one"
        ) from error
    patches: list[Patch] = []
    for number, line in enumerate(series_path.read_text("utf-8").splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] not in GROUPS or not NAME.match(words[1]):
            raise PatchToolError(
                f"{series_path}, line {number}: '{line}' is not 'GROUP NNNN-name.patch'",
                f"use a group of {', '.join(GROUPS)} and a file name like 0001-what-it-does.patch",
            )
        patches.append(Patch(words[0], directory / words[1]))
    return Series(directory, version, wheels, tuple(patches))
