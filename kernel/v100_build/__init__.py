"""Builds a release: pinned wheels, sm_70 kernels and the patch series in; wheels and hashes out.

``python -m v100_build --help`` lists the commands.  The modules follow the flow of the build:
``wheels`` (fetch by hash) -> ``toolchain`` (NVRTC, headers, binary tools) -> ``cubins`` (compile,
check resources) -> ``library`` (embed, link) -> ``pack`` (patched wheels) -> ``manifest`` (every
hash) -> ``release`` (all of it, and what is up to date); ``serve`` makes interpreters that can
serve a release or its stock control on CPU.
"""
