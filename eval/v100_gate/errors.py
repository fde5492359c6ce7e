"""Errors an operator meets. Each carries what to do; the command line prints them bare."""

from __future__ import annotations


class GateError(Exception):
    """A gate cannot go on. The message names the cause and what to do about it."""

    exit_code = 2


class ProfileError(GateError):
    """A profile, arms or waiver file is wrong; the message names the file and the field."""


class RefusedError(GateError):
    """The gate refuses to start or to judge (foreign GPU use, foreign hashes, impossible KV)."""

    exit_code = 3


class ServiceError(GateError):
    """A service did not start, died or stopped answering."""

    exit_code = 4


class StorageError(GateError):
    """Raw data could not be written."""

    exit_code = 5
