"""Waivers: a person's acceptance of one failed or missing check, for a time."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from v100_gate.checks import CHECKS
from v100_gate.errors import ProfileError
from v100_gate.schema import Profile, Waiver, WaiverFile, read_yaml


def shipped_profiles() -> set[str]:
    """Names of the profiles of this project; empty where only the package is installed."""
    folder = Path(__file__).parents[1] / "profiles"
    return {path.stem for path in folder.glob("*.yaml")}


def load(
    path: Path | None, profile: Profile, today: dt.date, known: set[str] | None = None
) -> dict[str, Waiver]:
    """Waivers of a profile, by check.

    Every entry is checked, whichever profile it is for: a misspelt profile would otherwise keep
    an expired waiver in the file for ever.

    Args: known: names of all profiles there are; None when nobody knows.
    Raises: ProfileError for an expired waiver, one dated in the future, one for a check or a
        profile that does not exist, one for a check that the profile does not have, or two for
        the same check. A waiver that no longer applies has to leave the file: a reviewer must be
        able to read it as it stands.
    """
    if path is None:
        return {}
    found: dict[tuple[str, str], Waiver] = {}
    for waiver in read_yaml(path, WaiverFile).waivers:
        which = f"the waiver for {waiver.check} of profile {waiver.profile}"
        if waiver.check not in CHECKS:
            raise ProfileError(f"{path}: waiver for {waiver.check!r}, which no profile checks")
        if waiver.expires < today:
            raise ProfileError(
                f"{path}: {which} expired on {waiver.expires}; renew it with a new review, or "
                "remove it"
            )
        if waiver.date > today:
            raise ProfileError(f"{path}: {which} is dated {waiver.date}, which is to come")
        if (waiver.profile, waiver.check) in found:
            raise ProfileError(f"{path}: two waivers for {waiver.check} of {waiver.profile}")
        found[waiver.profile, waiver.check] = waiver
        if known is not None and waiver.profile not in known | {profile.name}:
            raise ProfileError(
                f"{path}: {which}: there is no such profile, only "
                f"{', '.join(sorted(known | {profile.name}))}; correct the name, and keep waivers "
                "for profiles of your own in a file beside them"
            )
        if waiver.profile == profile.name and waiver.check not in profile.checks:
            raise ProfileError(
                f"{path}: waiver for {waiver.check!r}, which profile {profile.name} does not "
                "check; remove it"
            )
    return {check: waiver for (name, check), waiver in found.items() if name == profile.name}
