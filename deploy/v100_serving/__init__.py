"""Serving profiles of V100 nodes: their schema, what they demand, what the card can give.

A profile is a YAML file (``deploy/profiles``). Everything that can be known about it before a GPU
is touched is computed here: the engine's command line, the KV page that vLLM will choose, the
memory that a rank needs. An impossible combination raises `ImpossibleProfile`, whose text is the
arithmetic.
"""

from v100_serving.memory import CARDS_GIB, ImpossibleProfile, MemoryPlan, plan_memory
from v100_serving.pages import KvPages, kv_pages
from v100_serving.profiles import Profile, ProfileError, load_profile

__all__ = [
    "CARDS_GIB",
    "ImpossibleProfile",
    "KvPages",
    "MemoryPlan",
    "Profile",
    "ProfileError",
    "kv_pages",
    "load_profile",
    "plan_memory",
]
