"""The patch tool: applies, verifies and refreshes the patch series against vLLM.

The build needs one call, `apply_series`; everything else is behind `python -m v100_patches`.
"""

from v100_patches.apply import AppliedPatch, apply_series
from v100_patches.errors import HunkError, PatchToolError

__all__ = ["AppliedPatch", "HunkError", "PatchToolError", "apply_series"]
