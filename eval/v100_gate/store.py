"""The results folder: atomic writes, resume, and what happens when the disk is full.

Every raw file is written beside its place, synced and renamed, so that a file that exists is
whole. A few MiB of ballast are reserved when a run begins: when the disk fills up, the ballast
is given back, the record in hand is written into the space it leaves, and the run stops in good
order. Nothing measured before the fault is lost.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import shutil
from pathlib import Path

from pydantic import BaseModel

from v100_gate.errors import StorageError

BALLAST_BYTES = 16 << 20


def _write_bytes(path: Path, data: bytes) -> None:
    """Write a new file and sync it. Apart so that a test can make it fail."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class Store:
    """Writes below one run folder."""

    def __init__(self, root: Path, ballast_bytes: int = BALLAST_BYTES) -> None:
        self.root = root
        self.ballast = root / ".ballast"
        self.ballast_bytes = ballast_bytes

    def open(self, free_mib: int) -> None:
        """Make the folder and reserve the ballast.

        Raises: StorageError when less than `free_mib` MiB are free.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if free < free_mib << 20:
            raise StorageError(
                f"{self.root}: {free >> 20} MiB free, the profile asks for {free_mib} MiB "
                "(limits.free_disk_mib); free some space or choose another --results folder"
            )
        if not self.ballast.exists():
            _write_bytes(self.ballast, os.urandom(self.ballast_bytes))

    def close(self) -> None:
        """Give the ballast back."""
        self.ballast.unlink(missing_ok=True)

    def write(self, relative: str, data: bytes) -> Path:
        """Write one file atomically.

        Raises: StorageError when the disk is full; the data is then on disk nevertheless if the
        ballast made room for it, and the message says where.
        """
        path = self.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        try:
            _write_bytes(partial, data)
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(f"{path}: {error.strerror}") from None
            if not self.ballast.exists():
                raise StorageError(f"{path}: the disk is full and the reserve is used up") from None
            self.close()
            try:
                _write_bytes(partial, data)
                partial.replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise StorageError(
                    f"{path}: the disk is full, even the reserve of {self.ballast_bytes >> 20} MiB "
                    f"did not hold {len(data)} bytes; earlier records are complete"
                ) from None
            raise StorageError(
                f"{self.root}: the disk is full. {relative} and everything before it are written; "
                "free space and continue with --resume"
            ) from None
        return path

    def write_json(self, relative: str, value: BaseModel | dict | list) -> Path:
        """Write JSON: models by their aliases, two-space indent only for small documents."""
        if isinstance(value, BaseModel):
            data = value.model_dump(mode="json", by_alias=True)
        else:
            data = value
        text = json.dumps(data, indent=1 if not relative.count("/waves/") else None)
        return self.write(relative, text.encode() + b"\n")

    def write_gzip(self, relative: str, text: str) -> Path:
        """Write compressed text with a fixed header, so that equal text gives equal bytes."""
        return self.write(relative, gzip.compress(text.encode(), mtime=0))

    def read_json(self, relative: str) -> dict | None:
        """Read a JSON file of this run; None when it is not there."""
        path = self.root / relative
        return json.loads(path.read_text()) if path.exists() else None
