"""Attention for SM70 (Tesla V100): checked Python functions over the kernels of _vllm_fa2_C.

Importable without a GPU, without the extension and, but for the functions that take tensors,
without PyTorch; the extension is found, checked and loaded at the first use of :func:`load`.
"""

from .library import ABI, LibraryError, LibraryInfo, load, loaded, read_info

__all__ = ["ABI", "LibraryError", "LibraryInfo", "load", "loaded", "read_info"]
