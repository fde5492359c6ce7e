"""Waivers: a person's acceptance of one failed or missing check, for a time."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from v100_gate.checks import CHECKS
from v100_gate.errors import ProfileError
from v100_gate.schema import Profile, Waiver, WaiverFile, read_yaml


def load(path: Path | None, profile: Profile, today: dt.date) -> dict[str, Waiver]:
    """Waivers of a profile, by check.

    Raises: ProfileError for an expired waiver, one dated in the future, one for a check that the
        profile does not have, or two for the same check. A waiver that no longer applies has to
        leave the file: a reviewer must be able to read it as it stands.
    """
    if path is None:
        return {}
    found: dict[str, Waiver] = {}
    for waiver in read_yaml(path, WaiverFile).waivers:
        if waiver.check not in CHECKS:
            raise ProfileError(f"{path}: waiver for {waiver.check!r}, which no profile checks")
        if waiver.profile != profile.name:
            continue
        if waiver.check not in profile.checks:
            raise ProfileError(
                f"{path}: waiver for {waiver.check!r}, which profile {profile.name} does not "
                "check; remove it"
            )
        if waiver.expires < today:
            raise ProfileError(
                f"{path}: the waiver for {waiver.check} expired on {waiver.expires}; renew it "
                "with a new review, or remove it"
            )
        if waiver.date > today:
            raise ProfileError(f"{path}: the waiver for {waiver.check} is dated {waiver.date}")
        if waiver.check in found:
            raise ProfileError(f"{path}: two waivers for {waiver.check}")
        found[waiver.check] = waiver
    return found
