"""Who else is on the node: one look at the units that must be quiet and at the users of the GPUs.

The gate looks before a service is started, when it is loaded, once a second while a wave runs,
as a wave ends, and when all is measured. Every look is stored, because a refusal alone could be
continued past.
"""

from __future__ import annotations

from v100_gate import gpu
from v100_gate.schema import Hygiene
from v100_gate.services import Service
from v100_gate.traces import Look


def asked(hygiene: Hygiene) -> bool:
    """True when the arms file names anything to look at."""
    return bool(hygiene.stopped_units or hygiene.gpu)


def look(hygiene: Hygiene, service: Service) -> Look:
    """One look. Blocks for as long as systemctl and nvidia-smi take.

    The GPU processes of a service that somebody else runs (`kind: url`) cannot be told from
    foreign ones, and it may run on another node: then nobody knows who uses the GPUs.
    """
    foreign = None
    if hygiene.gpu and service.fresh:
        foreign = gpu.foreign_users(service.sessions, service.units)
    return Look(active_units=gpu.active_units(hygiene.stopped_units), foreign=foreign)
