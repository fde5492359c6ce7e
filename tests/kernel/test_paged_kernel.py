"""The ordinary paged kernel's sm_70 machine code, executed in the emulator, against FP64.

Lengths are small, to keep the emulation short: the split policy is the same at any length, and the
batches below cross pages, tiles (64 or 128 tokens), splits (256 tokens and more) and row chunks.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.sm70

KERNEL = Path(__file__).resolve().parents[2] / "kernel"
SENTINEL = np.float16(1234.0)
TOLERANCE = 1e-3  # of the largest value of a request and head: FP16 P, partial O and output
MAX_ROWS = 64  # of a CTA

_POINTERS = ("q", "k", "v", "table", "lens", "starts", "out", "partial_out", "partial_stats")
_STRIDES = ("q_token", "q_head", "out_token", "out_head", "k_page", "v_page", "table_row")
_INTS = ("k_token", "k_head", "v_token", "v_head", "pages", "table_width", "groups_per_page")
ARGS = np.dtype(  # PagedArgs of kernel/src/paged_args.h
    [(n, "<u8") for n in _POINTERS]
    + [(n, "<i8") for n in _STRIDES]
    + [(n, "<i4") for n in _INTS]
    + [("page_magic", "<u4")]
    + [(n, "<i4") for n in ("kv_heads", "group", "max_len", "max_query", "row_splits")]
    + [("qk_scale", "<f4"), ("out_scale", "<f4")],
    align=True,
)

POLICY = r"""
#include "paged_args.h"
using namespace sm70;
extern "C" int args_bytes() { return sizeof(PagedArgs); }
extern "C" int split_bound(int len, int n, int g, int h) { return paged_split_bound(len, n, g, h); }
extern "C" int row_splits(int len, int n, int g, int h) { return paged_row_splits(len, n, g, h); }
extern "C" int splits(int len, int n, int g, int h) { return paged_split_of(len, n, g, h).splits; }
extern "C" int units(int len, int n, int g, int h) { return paged_split_of(len, n, g, h).units; }
extern "C" int shared_bytes(int d, int b, int t) { return paged_shared_bytes(d, b, t); }
extern "C" int threads() { return kPagedThreads; }
extern "C" int join_threads() { return kPagedJoinThreads; }
extern "C" unsigned magic(int groups) { return page_magic(groups); }
"""


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of paged_args.h, which host and device share."""
    folder = tmp_path_factory.mktemp("policy")
    (folder / "policy.cpp").write_text(POLICY)
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{KERNEL / 'src'}",
         str(folder / "policy.cpp"), "-o", str(folder / "policy.so")],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(folder / "policy.so"))


@cache
def cubin(name: str) -> bytes:
    """The sm_70 cubin as the build makes it."""
    from v100_build.cubins import compile_cubin, load_specs

    spec = next(s for s in load_specs() if s.name == name)
    return compile_cubin(spec, 70).path.read_bytes()


def byte_values(kv: str) -> np.ndarray:
    """The value of each of the 256 bytes of an FP8 type; E4M3's NaN as the kernel reads it."""
    byte = np.arange(256)
    if kv == "e5m2":
        return (byte.astype(np.uint16) << 8).view(np.float16).astype(float)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return np.where(byte & 128, -value, value)


@dataclass(frozen=True)
class Batch:
    """One batch; see the fields of v100_operator's Case, which this mirrors in small."""

    dim: int = 256
    kv: str = "e4m3"
    group: int = 6
    kv_heads: int = 1
    page: int = 144
    lens: tuple[int, ...] = (700, 1, 0, 257)
    queries: tuple[int, ...] = (1, 1, 0, 1)
    interleaved: bool = False
    gap: int = 0
    max_len: int = 0
    max_query: int = 0
    seed: int = 1

    @property
    def contract(self) -> int:
        return self.max_len or max(1, *self.lens)

    @property
    def most_queries(self) -> int:
        return self.max_query or max(1, *self.queries)


class Run:
    """Device memory of a batch, its launches and its oracle."""

    def __init__(self, batch: Batch, policy: ctypes.CDLL) -> None:
        import sm70sim

        self.b, self.policy = b, p = batch, policy
        rng = np.random.default_rng(b.seed)
        size = 2 if b.kv == "fp16" else 1
        self.row_bytes = row = b.dim * size
        self.token = token = row * b.kv_heads * (2 if b.interleaved else 1) + b.gap
        counts = [-(-n // b.page) for n in b.lens]
        self.pages = pages = sum(counts) + 1
        self.rows = p.row_splits(b.contract, b.most_queries, b.group, b.kv_heads)
        slots = len(b.lens) * b.kv_heads * self.rows
        tokens, heads = sum(b.queries), b.group * b.kv_heads
        self.dev = dev = sm70sim.Device(
            (1 << 22) + 4 * pages * b.page * token + slots * b.dim * 3, track_init=True
        )
        self.caches = []
        for _ in range(1 if b.interleaved else 2):
            memory = dev.empty(pages * b.page * token + b.gap, np.uint8)
            if b.kv == "fp16":
                values = rng.standard_normal(memory.np.size // 2).astype(np.float16)
                memory.np[: values.nbytes] = values.view(np.uint8)
            else:
                raw = rng.integers(0, 256, memory.np.size, dtype=np.uint8)
                memory.np[:] = raw & 0x80 | (raw & 0x7F) % (0x48 if b.kv == "e4m3" else 0x44)
            memory.mark_initialised()
            self.caches.append((memory, b.gap))
        if b.interleaved:
            self.caches.append((self.caches[0][0], b.gap + row * b.kv_heads))
        # Reversed pages, -1 past the end, NaN bytes past the end and in the page nobody owns.
        self.table = np.full((len(b.lens), max(counts) + 1), -1, np.int32)
        at = pages - 2
        for request, count in enumerate(counts):
            self.table[request, :count] = np.arange(at, at - count, -1)
            at -= count
        owned = np.zeros(pages * b.page, bool)
        for request, length in enumerate(b.lens):
            owned[self._positions(request, length)] = True
        for memory, offset in self.caches:
            for position in np.flatnonzero(~owned):
                start = position * token + offset
                memory.np[start : start + row * b.kv_heads] = 0x7F
        self.query = rng.standard_normal((max(tokens, 1), heads, b.dim)).astype(np.float16)
        starts = np.concatenate([[0], np.cumsum(b.queries)]).astype(np.int32)
        self.starts = starts
        self.out = dev.put(np.full((tokens + 2, heads, b.dim), SENTINEL, np.float16))
        # Never written by the host: reading what no split wrote is an error of the emulator.
        self.partial = dev.empty((slots, b.dim), np.float16)
        self.stats = dev.empty((slots, 2), np.float32)
        self.k_scale, self.v_scale = 0.5, 0.25
        unit = 256.0 if b.kv == "e4m3" else 1.0
        args = np.zeros((), ARGS)
        assert ARGS.itemsize == p.args_bytes()
        values = {
            "q": dev.put(self.query).addr, "table": dev.put(self.table).addr,
            "k": self.caches[0][0].addr + self.caches[0][1],
            "v": self.caches[1][0].addr + self.caches[1][1],
            "lens": dev.put(np.array(b.lens, np.int32)).addr, "starts": dev.put(starts).addr,
            "out": self.out.addr, "partial_out": self.partial.addr,
            "partial_stats": self.stats.addr,
            "q_token": heads * b.dim, "q_head": b.dim, "out_token": heads * b.dim,
            "out_head": b.dim, "k_page": b.page * token, "v_page": b.page * token,
            "table_row": self.table.shape[1], "k_token": token, "v_token": token, "k_head": row,
            "v_head": row, "pages": pages, "table_width": self.table.shape[1],
            "groups_per_page": b.page // 16,
            "page_magic": p.magic(b.page // 16) & 0xFFFFFFFF, "kv_heads": b.kv_heads,
            "group": b.group, "max_len": b.contract, "max_query": b.most_queries,
            "row_splits": self.rows,
            "qk_scale": b.dim**-0.5 * self.k_scale * unit * np.log2(np.e),
            "out_scale": self.v_scale * unit,
        }  # fmt: skip
        for name, value in values.items():
            args[name] = value
        self.args = args.tobytes()

    def _positions(self, request: int, length: int) -> np.ndarray:
        position = np.arange(length)
        page = self.table[request, position // self.b.page].astype(np.int64)
        return page * self.b.page + position % self.b.page

    def go(self, row_tiles: int = 0, **how: bool) -> np.ndarray:
        """Split and join; the whole output, spare rows included."""
        import sm70sim

        b, p = self.b, self.policy
        rows = b.group * b.most_queries
        tiles = row_tiles or next(t for t in (1, 2, 4, 6, 8) if t == 8 or rows <= t * 8)
        chunks = -(-rows // MAX_ROWS)
        grid = (chunks * b.kv_heads, p.split_bound(b.contract, 1, b.group, b.kv_heads), len(b.lens))
        module = sm70sim.Module(cubin(f"paged_d{b.dim}_{b.kv}"), self.dev)
        shared = p.shared_bytes(b.dim, 2 if b.kv == "fp16" else 1, tiles)
        module.launch(f"paged_split_t{tiles}", grid, p.threads(), [self.args], shared, **how)
        grid = (rows, b.kv_heads, len(b.lens))
        module.launch("paged_join", grid, p.join_threads(), [self.args], **how)
        return self.out.np.copy()

    def oracle(self, request: int, head: int) -> np.ndarray:
        b = self.b
        length, queries = b.lens[request], b.queries[request]
        base = self._positions(request, length) * self.token + head * self.row_bytes

        def values(cache: int) -> np.ndarray:
            memory, offset = self.caches[cache]
            raw = memory.np[base[:, None] + offset + np.arange(self.row_bytes)]
            if b.kv == "fp16":
                return raw.view(np.float16).astype(float)
            return byte_values(b.kv)[raw]

        heads = slice(head * b.group, (head + 1) * b.group)
        first = self.starts[request]
        q = self.query[first : first + queries, heads].astype(float)
        scores = np.einsum("tgd,kd->tgk", q, values(0)) * self.k_scale * b.dim**-0.5
        last = length - queries + np.arange(queries)
        scores[np.arange(length)[None, None] > last[:, None, None].repeat(b.group, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("tgk,kd->tgd", weights, values(1)) * self.v_scale

    def check(self, out: np.ndarray) -> None:
        """Right where requests own rows, untouched elsewhere."""
        b = self.b
        owned = np.zeros(out.shape[0], bool)
        for request, queries in enumerate(b.queries):
            first = self.starts[request]
            if not queries or not 0 < b.lens[request] <= b.contract:
                continue
            owned[first : first + queries] = True
            for head in range(b.kv_heads):
                want = self.oracle(request, head)
                got = out[first : first + queries, head * b.group : (head + 1) * b.group]
                error = np.abs(got.astype(float) - want).max() / np.abs(want).max()
                assert error < TOLERANCE, f"request {request}, KV head {head}: error {error:.1e}"
        assert (out[~owned] == SENTINEL).all(), "rows that no request owns were written"


MATRIX = [
    pytest.param(Batch(dim, kv, group, heads, page, interleaved=inter, gap=gap), id=f"d{dim}-{kv}")
    for dim, kv, group, heads, page, inter, gap in (
        (64, "fp16", 8, 2, 16, True, 8),
        (64, "e4m3", 1, 3, 144, False, 0),
        (64, "e5m2", 4, 2, 1648, True, 0),
        (128, "fp16", 4, 1, 144, False, 8),
        (128, "e4m3", 8, 1, 16, True, 8),
        (128, "e5m2", 5, 2, 144, False, 0),
        (256, "fp16", 6, 1, 144, True, 8),
        (256, "e4m3", 6, 2, 144, True, 8),
        (256, "e5m2", 8, 1, 16, False, 0),
    )
]


@pytest.mark.parametrize("batch", MATRIX)
def test_every_head_dim_and_cache_type(batch: Batch, policy: ctypes.CDLL) -> None:
    """Decode rows of a ragged batch: two KV heads, odd strides, a padded request, NaN past ends;
    no hazard on shared memory."""
    run = Run(batch, policy)
    run.check(run.go(races=True))


@pytest.mark.parametrize(
    "batch",
    [
        Batch(lens=(300, 9, 0, 1100), queries=(2, 2, 0, 1)),
        Batch(lens=(600, 5, 100), queries=(5, 1, 4)),
        Batch(lens=(530, 8, 0, 129), queries=(8, 8, 0, 3), page=1648),
        Batch(lens=(300, 16, 40), queries=(16, 10, 1), group=16),
    ],
    ids=["16 rows", "30 rows", "48 rows", "256 rows in four chunks"],
)
def test_query_lengths_in_any_mix(batch: Batch, policy: ctypes.CDLL) -> None:
    """Each instantiation by row count, causal inside the query window; no hazard either."""
    run = Run(batch, policy)
    run.check(run.go(races=True))


def test_same_bits_whatever_else_is_in_the_batch(policy: ctypes.CDLL) -> None:
    """A request alone, in a batch whose other rows need the widest instantiation, and with the
    warps of each block run in the opposite order."""
    batch = Batch(lens=(700, 90), queries=(1, 1), max_len=4000)
    narrow = Run(batch, policy).go()
    for row_tiles in (2, 4, 6, 8):
        wide = Run(replace(batch, max_query=row_tiles * 8 // batch.group), policy).go(row_tiles)
        assert narrow.tobytes() == wide.tobytes(), f"{row_tiles} row tiles"
    assert narrow.tobytes() == Run(batch, policy).go(reverse=True).tobytes()
    both = Run(batch, policy)
    alone = Run(replace(batch, lens=(700,), queries=(1,)), policy)
    # The same cache bytes, query and pages for the request that is alone.
    owner, single = both._positions(0, 700), alone._positions(0, 700)
    for (source, _), (target, _) in zip(both.caches, alone.caches, strict=True):
        size = both.token
        source_rows = source.np[: both.pages * 144 * size].reshape(-1, size)
        target_rows = target.np[: alone.pages * 144 * size].reshape(-1, size)
        target_rows[single] = source_rows[owner]
    q_address = int(np.frombuffer(alone.args, ARGS)["q"][0]) - alone.dev.base
    alone.dev.mem[q_address : q_address + both.query[:1].nbytes] = np.frombuffer(
        both.query[:1].tobytes(), np.uint8
    )
    assert alone.go()[:1].tobytes() == narrow[:1].tobytes()


def test_a_length_above_the_contract_writes_nothing(policy: ctypes.CDLL) -> None:
    run = Run(Batch(lens=(300, 500), queries=(1, 1), max_len=400), policy)
    out = run.go()
    run.check(out)
    assert (out[1] == SENTINEL).all()


def test_nan_inside_a_request_comes_out(policy: ctypes.CDLL) -> None:
    """E5M2 and FP16 NaN propagate; an E4M3 NaN byte reads as +-480 (documented)."""
    run = Run(Batch(kv="e5m2", dim=256, group=8, page=16), policy)
    memory, offset = run.caches[1]
    memory.np[run._positions(0, 700)[350] * run.token + offset] = 0x7F
    assert np.isnan(run.go()[0, :, 0].astype(float)).all()


def test_the_wrapper_sizes_the_workspace_as_the_kernel_does(policy: ctypes.CDLL) -> None:
    from sm70_attention.paged import row_splits

    for length in (1, 128, 129, 256, 257, 4096, 20480, 41088, 262144, 1 << 20):
        for queries, group, heads in ((1, 6, 1), (8, 6, 1), (16, 16, 1), (1, 1, 8), (3, 5, 2)):
            ours = row_splits(length, queries, group, heads)
            assert ours == policy.row_splits(length, queries, group, heads)
            for shorter in {1, length // 3 + 1, length - 1 or 1, length}:
                for fewer in range(1, queries + 1):
                    splits = policy.splits(shorter, fewer, group, heads)
                    assert splits * fewer * group <= ours
                    assert splits <= policy.split_bound(length, 1, group, heads)
                    units = policy.units(shorter, fewer, group, heads)
                    assert (splits - 1) * units * 128 < shorter <= splits * units * 128
