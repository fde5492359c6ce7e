"""What the attention cases share: paged E4M3 caches in simulated memory, and the FP64 oracle."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import build
from ..cubin import Cubin
from ..device import DevArray, Device
from ..errors import SimError
from . import Shape

SOURCES = Path(__file__).parents[2] / "src"
K_SCALE, V_SCALE = 0.5, 0.25
TOLERANCE = 2e-3  # of the largest value: FP16 probabilities, partial results and output
CHUNK = 4096  # tokens that the oracle takes at a time


def shipped_cubin(name: str) -> Cubin:
    """The sm_70 cubin of kernels.toml with that name, as the build makes it."""
    from v100_build.cubins import compile_cubin, load_specs

    found = [s for s in load_specs() if s.name == name]
    if not found:
        raise SimError(f"kernels.toml lists no cubin {name}")
    return Cubin(compile_cubin(found[0], 70).path)


def host_functions(header: str, functions: str) -> ctypes.CDLL:
    """C functions that use a header of kernel/src: what the host launcher computes."""
    text = f'#include "{header}"\nusing namespace sm70;\n{functions}\n'
    return build.host_library(text, SOURCES)


def e4m3_values() -> np.ndarray:
    """The value of each of the 256 bytes; the NaN bytes as +-480, as the kernels read them."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return np.where(byte & 128, -value, value)


@dataclass
class Batch:
    """Inputs of one layer: K and V apart, pages in random order, values up to 4."""

    shape: Shape
    dev: Device
    q: DevArray
    k: DevArray
    v: DevArray
    table: DevArray
    lens: DevArray
    starts: DevArray
    out: DevArray

    @property
    def token_bytes(self) -> int:
        """Bytes from a token of a cache to the next."""
        return self.shape.kv_heads * self.shape.head_dim

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.shape.q_heads * self.shape.kv_heads

    def strides(self) -> dict[str, int]:
        """The strides by the names of the argument structs, and the pages."""
        s, token = self.shape, self.token_bytes
        row = self.heads * s.head_dim
        groups = s.page // 16
        return {
            "q": self.q.addr,
            "k": self.k.addr,
            "v": self.v.addr,
            "table": self.table.addr,
            "lens": self.lens.addr,
            "starts": self.starts.addr,
            "out": self.out.addr,
            "q_token": row,
            "q_head": s.head_dim,
            "out_token": row,
            "out_head": s.head_dim,
            "k_page": s.page * token,
            "v_page": s.page * token,
            "table_row": self.table.np.shape[1],
            "k_token": token,
            "k_head": s.head_dim,
            "v_token": token,
            "v_head": s.head_dim,
            "pages": self.k.nbytes // (s.page * token),
            "groups_per_page": groups,
            "magic": 0 if groups == 1 else (1 << 32) // groups + 1,
            "qk_scale": s.head_dim**-0.5 * K_SCALE * 256 * np.log2(np.e),
            "out_scale": V_SCALE * 256,
        }

    def error(self, request: int) -> float:
        """Largest error of a request over its largest value, against FP64."""
        s, values = self.shape, e4m3_values()
        length, worst = s.lengths[request], 0.0
        first = int(self.starts.np[request])
        last = length - s.query + np.arange(s.query)
        for head in range(s.kv_heads):
            mine = slice(head * s.q_heads, (head + 1) * s.q_heads)
            q = self.q.np[first : first + s.query, mine].astype(float)
            top = np.full((s.query, s.q_heads, 1), -np.inf)
            total, acc = np.zeros_like(top), np.zeros_like(q)
            for at in range(0, length, CHUNK):
                position = np.arange(at, min(at + CHUNK, length))
                page = self.table.np[request, position // s.page].astype(np.int64)
                rows = page * s.page + position % s.page

                def part(cache: DevArray, scale: float, rows=rows, head=head) -> np.ndarray:
                    tokens = cache.np.reshape(-1, s.kv_heads, s.head_dim)
                    return values[tokens[rows, head]] * scale

                scores = np.einsum("thd,kd->thk", q, part(self.k, K_SCALE)) * s.head_dim**-0.5
                visible = position <= last[:, None]
                scores = np.where(visible[:, None], scores, -np.inf)
                new = np.maximum(top, scores.max(-1, keepdims=True))
                p, keep = np.exp(scores - new), np.exp(top - new)
                total = total * keep + p.sum(-1, keepdims=True)
                acc = acc * keep + np.einsum("thk,kd->thd", p, part(self.v, V_SCALE))
                top = new
            want = acc / total
            got = self.out.np[first : first + s.query, mine].astype(float)
            worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
        return worst

    def check(self) -> float:
        """Error of the first and the last request; SimError if it is too large."""
        error = max(self.error(r) for r in {0, len(self.shape.lengths) - 1})
        if not error < TOLERANCE:
            raise SimError(f"{self.shape}: error {error:.1e} against FP64")
        return error


def make_batch(shape: Shape, workspace: int) -> Batch:
    """Fill simulated memory; workspace: further bytes that the case allocates."""
    rng = np.random.default_rng(1)
    counts = [-(-n // shape.page) for n in shape.lengths]
    cache = (sum(counts) + 1) * shape.page * shape.kv_heads * shape.head_dim
    rows = len(shape.lengths) * shape.query
    heads = shape.q_heads * shape.kv_heads
    dev = Device(2 * cache + workspace + 4 * rows * heads * shape.head_dim + (1 << 22))
    block = rng.integers(0, 256, 1 << 22, dtype=np.uint8)
    block = block & 0x80 | (block & 0x7F) % 0x48
    caches = []
    for shift in (0, 1 << 11):  # the same bytes at other places
        memory = dev.empty(cache, np.uint8)
        memory.np[:] = np.resize(np.roll(block, shift), cache)
        caches.append(memory)
    table = np.full((len(counts), max(counts) + 1), -1, np.int32)
    order, used = rng.permutation(sum(counts)), 0
    for request, n in enumerate(counts):
        table[request, :n] = order[used : used + n]
        used += n
    starts = np.arange(len(counts) + 1, dtype=np.int32) * shape.query
    q = rng.standard_normal((rows, heads, shape.head_dim)).astype(np.float16)
    return Batch(
        shape,
        dev,
        dev.put(q),
        *caches,
        dev.put(table),
        dev.put(np.array(shape.lengths, np.int32)),
        dev.put(starts),
        dev.zeros(q.shape, np.float16),
    )
