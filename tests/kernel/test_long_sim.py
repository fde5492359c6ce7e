"""The long kernel's sm_70 machine code, executed in the emulator, against an FP64 oracle.

Lengths are small, to keep the emulation short; the split policy is the same at any length.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.sm70

KERNEL = Path(__file__).resolve().parents[2] / "kernel"
D, GROUP, QUERY = 256, 6, 8
CTAS, THREADS = 80, 256
JOINS = {"long_join_few": (48, 320), "long_join_many": (48, 320)}  # CTAs a request, threads
NAN_BYTES = np.array([0x7F, 0xFF], np.uint8)
UNTOUCHED = 7.0
TOLERANCE = 2e-3  # of the largest value of a request and head: FP16 P, partial O and output

POINTERS = ("q", "k", "v", "table", "lens", "starts", "out", "partial", "stats", "leaves")
LONG_STRIDES = ("q_token", "q_head", "out_token", "out_head", "k_page", "v_page", "table_row")
INTS = ("k_token", "k_head", "v_token", "v_head", "pages", "groups_per_page")
ARGS = np.dtype(  # LongArgs of kernel/src/long_args.h
    [(n, "<u8") for n in POINTERS]
    + [(n, "<i8") for n in LONG_STRIDES]
    + [(n, "<i4") for n in INTS]
    + [("magic", "<u4"), ("requests", "<i4"), ("max_len", "<i4"), ("slots", "<i4")]
    + [("qk_scale", "<f4"), ("out_scale", "<f4")]
)


def e4m3_values(nan: float = 480.0) -> np.ndarray:
    """The value of each of the 256 bytes; NaN bytes as +-``nan``."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(
        exponent == 0,
        mantissa / 8 * 2.0**-6,
        (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7),
    )
    value[(byte & 0x7F) == 0x7F] = nan
    return np.where(byte & 128, -value, value)


@cache
def cubin(name: str) -> bytes:
    from v100_build.cubins import compile_cubin, load_specs

    spec = next(s for s in load_specs() if s.name == name)
    built = compile_cubin(spec, 70)
    assert all(r.clean for r in built.resources.values()), "spills or local memory on sm_70"
    return built.path.read_bytes()


def shared_bytes() -> int:
    text = (KERNEL / "src/long_args.h").read_text()
    return int(re.search(r"kLongSharedBytes = (\d+)", text).group(1))


class Case:
    """Caches, tables and queries of a batch, in simulated memory; everything that the kernel
    must not use holds garbage."""

    def __init__(
        self,
        lens,
        tokens=None,
        page=1648,
        heads=1,
        seed=0,
        interleave=False,
        shift=0,
        gap=0,
        max_len=None,
        whole_range=False,
    ):
        import sm70sim
        from sm70_attention.long import BLOCK_LEAVES, leaves

        rng = np.random.default_rng(seed)
        self.lens, self.page, self.heads, self.batch = list(lens), page, heads, len(lens)
        self.tokens = tokens or [QUERY if n else 0 for n in lens]
        self.k_scale, self.v_scale, self.scale = 0.5, 0.25, D**-0.5
        self.max_len = max_len or max(*lens, 1)
        columns = [-(-n // page) for n in lens]
        pages = sum(columns) + 1
        self.step = D * heads * (2 if interleave else 1) + gap  # bytes of a token
        size = pages * page * self.step
        slots = -(-leaves(self.max_len) // BLOCK_LEAVES) * BLOCK_LEAVES
        results = self.batch * heads * slots
        self.dev = dev = sm70sim.Device(
            2 * size + results * 25_000 + sum(self.tokens) * heads * GROUP * D * 4 + (1 << 22)
        )

        def fill(n: int) -> np.ndarray:
            data = rng.integers(0, 256, n, dtype=np.uint8)
            low = data & 0x7F if whole_range else (data & 0x7F) % 0x48  # up to 448, up to 4
            return data & 0x80 | np.where(low == 0x7F, 0x7E, low)

        self.k_memory = dev.put(fill(size + shift))
        self.v_memory = self.k_memory if interleave else dev.put(fill(size + shift))
        self.k_at, self.v_at = shift, shift + (D * heads if interleave else 0)
        width = max(max(columns), -(-self.max_len // page)) + 1
        self.table = np.full((self.batch, width), -1, np.int32)
        order, used = rng.permutation(pages), 0
        for b, n in enumerate(columns):
            self.table[b, :n] = order[used : used + n]
            used += n
        self.starts = np.concatenate([[0], np.cumsum(self.tokens)]).astype(np.int32)
        rows = max(int(self.starts[-1]), 1)
        self.q_host = rng.standard_normal((rows, GROUP * heads, D)).astype(np.float16)
        self.q, self.table_dev = dev.put(self.q_host), dev.put(self.table)
        self.out = dev.put(np.full_like(self.q_host, UNTOUCHED))
        self.lens_dev, self.starts_dev = dev.put(np.array(lens, np.int32)), dev.put(self.starts)
        partial = dev.put(np.full((results, 48 * D), np.nan, np.float16))
        stats = dev.put(np.full((results, 48, 2), np.nan, np.float32))
        held = dev.put(np.full(results, 0x55555555, np.int32))
        groups = page // 16
        a = np.zeros(1, ARGS)
        values = {
            "q": self.q.addr, "k": self.k_memory.addr + self.k_at,
            "v": self.v_memory.addr + self.v_at, "table": self.table_dev.addr,
            "lens": self.lens_dev.addr, "starts": self.starts_dev.addr, "out": self.out.addr,
            "partial": partial.addr, "stats": stats.addr, "leaves": held.addr,
            "q_token": GROUP * heads * D, "q_head": D, "out_token": GROUP * heads * D,
            "out_head": D, "k_page": page * self.step, "v_page": page * self.step,
            "table_row": width, "k_token": self.step, "k_head": D, "v_token": self.step,
            "v_head": D, "pages": pages, "groups_per_page": groups,
            "magic": 0 if groups == 1 else (1 << 32) // groups + 1, "requests": self.batch,
            "max_len": self.max_len, "slots": slots,
            "qk_scale": self.scale * self.k_scale * 256 * np.log2(np.e),
            "out_scale": self.v_scale * 256,
        }  # fmt: skip
        for name, value in values.items():
            a[name] = value
        self.args = a.tobytes()

    def run(self, name: str = "long_k16", **how: bool) -> np.ndarray:
        """The output of the split and of either join, which must agree to the bit.

        how: options of Module.launch.
        """
        import sm70sim

        module = sm70sim.Module(cubin(name), self.dev)
        module.launch(
            "long_split", (CTAS, 1, self.heads), (THREADS,), [self.args], shared_bytes(), **how
        )
        results = []
        for join, (ctas, threads) in JOINS.items():
            self.out.np[...] = UNTOUCHED
            module.launch(join, (ctas, self.batch, self.heads), (threads,), [self.args], **how)
            results.append(self.out.np.copy())
        assert results[0].tobytes() == results[1].tobytes(), "the two joins differ"
        return results[0]

    def rows(self, b: int) -> slice:
        return slice(int(self.starts[b]), int(self.starts[b + 1]))

    def places(self, b: int, end: int | None = None) -> np.ndarray:
        """Byte offsets of the tokens of a request, from a cache's address."""
        pos = np.arange(self.lens[b] if end is None else end)
        page = self.table[b, pos // self.page].astype(np.int64)
        return (page * self.page + pos % self.page) * self.step

    def oracle(self, b: int, values: np.ndarray | None = None) -> np.ndarray:
        """FP64 result of a request: [tokens, heads * 6, 256]."""
        values = e4m3_values() if values is None else values
        n, length = self.tokens[b], self.lens[b]
        visible = np.arange(length)[None] <= length - n + np.arange(n)[:, None]
        out = []
        for h in range(self.heads):
            index = self.places(b)[:, None] + np.arange(D)[None] + h * D
            k = values[self.k_memory.np[index + self.k_at]] * self.k_scale
            v = values[self.v_memory.np[index + self.v_at]] * self.v_scale
            q = self.q_host[self.rows(b), h * GROUP : (h + 1) * GROUP].astype(float)
            s = np.einsum("thd,kd->thk", q, k) * self.scale
            s = np.where(visible[:, None], s, -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            out.append(np.einsum("thk,kd->thd", p / p.sum(-1, keepdims=True), v))
        return np.concatenate(out, 1)

    def error(self, out: np.ndarray, b: int, **kw) -> float:
        """Largest error of a request, over its largest value."""
        want = self.oracle(b, **kw)
        return float(np.abs(out[self.rows(b)].astype(float) - want).max() / np.abs(want).max())


def assert_right(case: Case, out: np.ndarray) -> None:
    for b in range(case.batch):
        if case.lens[b] and case.tokens[b]:
            error = case.error(out, b)
            assert error < TOLERANCE, f"request {b} of length {case.lens[b]}: error {error:.2e}"


def test_ragged_batch_with_an_empty_request_matches_fp64_in_any_warp_order():
    """With the warps run in the other order, and no two of them without a barrier between."""
    case = Case([1000, 37, 0, 2500], page=1648)
    out = case.run()
    assert_right(case, out)
    again = Case([1000, 37, 0, 2500], page=1648).run(reverse=True, races=True)
    assert again.tobytes() == out.tobytes(), "the result depends on the order of warps"


def test_short_queries_cross_pages_and_mask_the_tail():
    case = Case([7, 16, 130, 65], tokens=[3, 7, 5, 1], page=16)
    assert_right(case, case.run())


def test_two_kv_heads_interleaved_at_eight_bytes():
    kw = dict(lens=[700, 9], page=144, heads=2, interleave=True, shift=8, gap=8, whole_range=True)
    case = Case(**kw)
    assert_right(case, case.run("long_k8"))


def test_both_alignments_give_the_same_bits():
    assert Case([300]).run("long_k8").tobytes() == Case([300]).run("long_k16").tobytes()


def test_stale_bytes_never_reach_the_output():
    clean, stale = Case([90, 33], page=48, seed=3), Case([90, 33], page=48, seed=3)
    live = np.zeros(stale.k_memory.np.size, bool)
    for b in range(2):
        live[(stale.places(b)[:, None] + np.arange(D)).ravel()] = True
    for memory in (stale.k_memory, stale.v_memory):
        memory.np[~live] = np.resize(NAN_BYTES, int((~live).sum()))
    assert stale.run().tobytes() == clean.run().tobytes()


def test_a_nan_byte_inside_a_request_reads_as_480():
    case = Case([70], page=32, seed=4)
    place = case.places(0)
    case.k_memory.np[place[5] + 17] = 0x7F
    case.v_memory.np[place[60] + 200] = 0xFF
    assert_right(case, case.run())


def test_bits_do_not_depend_on_the_batch_and_nan_queries_stay_in_their_request():
    def put_first(case: Case, like: Case) -> Case:
        case.q.np[case.rows(0)] = like.q.np[like.rows(0)]
        for ours, theirs in ((case.k_memory, like.k_memory), (case.v_memory, like.v_memory)):
            for to, at in zip(case.places(0), like.places(0), strict=True):
                ours.np[to : to + D] = theirs.np[at : at + D]
        return case

    alone = Case([5200], page=1024, seed=5)
    batch = put_first(Case([5200, 6100, 5000], page=1024, seed=6), alone)
    batch.q.np[batch.rows(1)] = np.nan  # shares a CTA with the ends of both others
    batch.q_host[:] = batch.q.np
    out = batch.run(races=True)  # here a CTA goes from one request to the next
    assert out[batch.rows(0)].tobytes() == alone.run().tobytes()
    assert np.isnan(out[batch.rows(1)].astype(float)).all()
    assert batch.error(out, 2) < TOLERANCE


def test_leaves_of_two_tiles_in_a_row_on_one_cta_race_with_nothing():
    """The score warps run ahead while the value warps finish a leaf, furthest when leaves are
    short: 448 tokens are leaves of 2, 2 and 3 tiles, all of one CTA beside 40,000 tokens."""
    case = Case([448, 448, 256, 40_000], page=1648)
    out = case.run(races=True)
    assert max(case.error(out, b) for b in range(3)) < TOLERANCE
    assert out.tobytes() == case.run(reverse=True).tobytes()


def test_requests_that_the_contract_excludes_are_left_alone():
    case = Case([300, 40, 40, 200], tokens=[8, 9, 8, 0], page=64, max_len=256)
    case.table_dev.np[2, 0] = 1 << 30  # a page that does not exist: some page is read, no other
    out = case.run()
    for b in (0, 1, 3):
        assert (out[case.rows(b)] == UNTOUCHED).all(), f"request {b} was written"
    assert np.isfinite(out[case.rows(2)].astype(float)).all()
