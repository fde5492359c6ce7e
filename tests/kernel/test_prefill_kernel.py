"""The prefill kernel's sm_70 machine code, executed in the emulator, against an FP64 oracle."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

pytestmark = pytest.mark.sm70

TOLERANCE = 2e-3  # of the largest value of a request and head: FP16 P and output
SENTINEL = np.float16(1234.0)

ARGS = np.dtype(  # PrefillArgs of kernel/src/prefill_args.h
    [(n, "<u8") for n in ("q", "k", "v", "table", "lens", "starts", "out")]
    + [(n, "<i8") for n in ("q_token", "q_head", "out_token", "out_head")]
    + [(n, "<i8") for n in ("k_page", "v_page", "k_head", "v_head", "table_row")]
    + [(n, "<i4") for n in ("k_token", "v_token", "pages", "groups_per_page")]
    + [("page_magic", "<u4"), ("group", "<i4"), ("group_magic", "<u4")]
    + [(n, "<i4") for n in ("requests", "tokens", "max_len", "max_query")]
    + [("qk_scale", "<f4"), ("out_scale", "<f4"), ("padding", "<i4")]
)
UNIT = {"fp16": 1.0, "e4m3": 256.0, "e5m2": 1.0}  # a converted half times this is the value
NAN_BYTE = {"fp16": 0x7E, "e4m3": 0x7F, "e5m2": 0x7F}  # repeated: NaN in every element


def byte_values(kv: str) -> np.ndarray:
    """The value of each of the 256 bytes of an FP8 type; E4M3's NaN as the kernel reads it."""
    byte = np.arange(256)
    if kv == "e5m2":
        return (byte.astype(np.uint16) << 8).view(np.float16).astype(float)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return np.where(byte & 128, -value, value)


@cache
def cubin(name: str) -> bytes:
    from v100_build.cubins import compile_cubin, load_specs

    spec = next(s for s in load_specs() if s.name == name)
    built = compile_cubin(spec, 70)
    assert all(r.clean for r in built.resources.values()), "spills or local memory on sm_70"
    return built.path.read_bytes()


def magic(d: int) -> int:
    return 0 if d == 1 else (1 << 32) // d + 1


class Case:
    """A batch in simulated memory. What the kernel must not use holds NaN, -1 or a sentinel.

    K and V of a token lie side by side with ``gap`` bytes after them, so that nothing is aligned
    to more than 8 bytes.
    """

    def __init__(self, dim, kv, lens, queries, group, heads=1, page=48, gap=8, seed=0, over=None):
        import sm70sim

        self.dim, self.kv, self.lens, self.queries = dim, kv, list(lens), list(queries)
        self.group, self.heads, self.page = group, heads, page
        self.scale, self.k_scale, self.v_scale = dim**-0.5, 0.5, 0.25
        rng = np.random.default_rng(seed)
        row = dim * (2 if kv == "fp16" else 1)
        self.row, self.token = row, 2 * heads * row + gap
        counts = [-(-n // page) for n in lens]
        self.pages = sum(counts) + 1
        size = self.pages * page * self.token + 8
        self.dev = sm70sim.Device(size + (1 << 22), track_init=True)
        self.table = np.full((len(lens), max(counts) + 1), -1, np.int32)
        order, at = rng.permutation(self.pages), 0
        cache_bytes = np.full(size, NAN_BYTE[kv], np.uint8)
        for r, count in enumerate(counts):
            self.table[r, :count] = order[at : at + count]
            at += count
            for position in range(lens[r]):
                first = self.address(r, position)
                cache_bytes[first : first + self.token] = self.fill(rng)
        self.cache = self.dev.put(cache_bytes)
        self.starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        tokens = int(self.starts[-1])
        queries_of = rng.standard_normal((tokens + 1, heads * group, dim)).astype(np.float16)
        self.q_memory = self.dev.put(queries_of)
        self.q = self.q_memory.np
        self.out = self.dev.put(np.full_like(self.q, SENTINEL))
        args = np.zeros(1, ARGS)
        halves = heads * group * dim
        limits = {"max_len": max(lens), "max_query": max(queries), **(over or {})}
        for name, value in dict(
            q=self.q_memory.addr, k=self.cache.addr + 8, v=self.cache.addr + 8 + heads * row,
            table=self.dev.put(self.table).addr, lens=self.dev.put(np.array(lens, np.int32)).addr,
            starts=self.dev.put(self.starts).addr, out=self.out.addr, q_token=halves, q_head=dim,
            out_token=halves, out_head=dim, k_page=page * self.token, v_page=page * self.token,
            k_head=row, v_head=row, table_row=self.table.shape[1], k_token=self.token,
            v_token=self.token, pages=self.pages, groups_per_page=page // 16,
            page_magic=magic(page // 16), group=group, group_magic=magic(group),
            requests=len(lens), tokens=tokens, qk_scale=self.scale * self.k_scale * UNIT[kv]
            * 1.4426950408889634, out_scale=self.v_scale * UNIT[kv], **limits,
        ).items():  # fmt: skip
            args[name] = value
        self.args = args.tobytes()

    def address(self, request: int, position: int) -> int:
        page = int(self.table[request, position // self.page])
        return 8 + (page * self.page + position % self.page) * self.token

    def fill(self, rng) -> np.ndarray:
        if self.kv == "fp16":
            return rng.standard_normal(self.token // 2).astype(np.float16).view(np.uint8)
        raw = rng.integers(0, 256, self.token, dtype=np.uint8)
        return (raw & 0x80) | (raw & 0x7F) % (0x48 if self.kv == "e4m3" else 0x41)  # up to 4

    def run(self, **how: bool) -> np.ndarray:
        """The output of a launch over a fresh sentinel; how: options of Module.launch."""
        import sm70sim

        rows = 64 if self.dim == 256 else 128
        self.out.np[:] = SENTINEL
        module = sm70sim.Module(cubin(f"prefill_d{self.dim}_{self.kv}"), self.dev)
        grid = (int(self.starts[-1]) * self.group // rows + len(self.lens), self.heads)
        shared = 2 * 32 * (self.dim + rows) * 2 + 32 + 3 * rows * 4
        module.launch("prefill_attention", grid, (256,), [self.args], smem=shared, **how)
        return self.out.np.copy()

    def rows(self, request: int) -> slice:
        return slice(int(self.starts[request]), int(self.starts[request + 1]))

    def want(self, request: int, head: int) -> np.ndarray:
        """[query tokens, group, D], FP64."""
        length, n = self.lens[request], self.queries[request]
        at = np.array([self.address(request, p) for p in range(length)])
        values = []
        for offset, scale in ((0, self.k_scale), (self.heads * self.row, self.v_scale)):
            first = at + offset + head * self.row
            raw = self.cache.np[first[:, None] + np.arange(self.row)]
            fp16 = self.kv == "fp16"
            x = raw.view(np.float16).astype(float) if fp16 else byte_values(self.kv)[raw]
            values.append(x * scale)
        k, v = values
        q = self.q[self.rows(request), head * self.group : (head + 1) * self.group].astype(float)
        scores = np.einsum("tgd,kd->tgk", q, k) * self.scale
        last = length - n + np.arange(n)
        scores[np.broadcast_to(np.arange(length) > last[:, None, None], scores.shape)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("tgk,kd->tgd", p / p.sum(-1, keepdims=True), v)

    def check(self, out: np.ndarray, live) -> None:
        owned = np.zeros(out.shape[0], bool)
        for r in live:
            owned[self.rows(r)] = True
            for head in range(self.heads):
                want = self.want(r, head)
                got = out[self.rows(r), head * self.group : (head + 1) * self.group]
                error = np.abs(got.astype(float) - want).max() / np.abs(want).max()
                assert error <= TOLERANCE, (r, head, error)  # false for NaN as well
        assert (out[~owned] == SENTINEL).all(), "rows that no request owns were written"


# Every head dimension with every type; groups that do and do not divide the tile; two KV heads.
KERNELS = [
    (256, "e4m3", 6, 1), (256, "fp16", 16, 1), (256, "e5m2", 1, 2), (128, "fp16", 8, 1),
    (128, "e4m3", 3, 2), (64, "fp16", 7, 2),
]  # fmt: skip
# Translating a kernel takes the emulator 20 s: these share their paths with those above.
MORE_KERNELS = [(128, "e5m2", 5, 1), (64, "e4m3", 16, 1), (64, "e5m2", 4, 1)]


@pytest.mark.parametrize(
    ("dim", "kv", "group", "heads"),
    [*KERNELS, *(pytest.param(*k, marks=pytest.mark.slow) for k in MORE_KERNELS)],
)
def test_against_fp64(dim, kv, group, heads):
    """A chunk on a past, a whole prompt, padding, one token, over page and tile ends; the same
    bits with the warps in another order, and no hazard on shared memory."""
    case = Case(dim, kv, (130, 33, 0, 71, 49), (25, 33, 0, 0, 1), group, heads)
    out = case.run()
    case.check(out, live=(0, 1, 4))
    assert out.tobytes() == case.run(reverse=True, races=True).tobytes()


def test_bits_do_not_depend_on_the_batch():
    """A request alone and behind others, in other pages."""
    alone = Case(256, "e4m3", (150,), (20,), 6, page=16)
    batch = Case(256, "e4m3", (100, 150, 40), (30, 20, 40), 6, page=16, seed=1)
    for position in range(150):
        a, b = alone.address(0, position), batch.address(1, position)
        batch.cache.np[b : b + batch.token] = alone.cache.np[a : a + alone.token]
    batch.q[30:50] = alone.q[:20]
    assert batch.run()[30:50].tobytes() == alone.run()[:20].tobytes()


def test_growing_maxima():
    """Scores that grow along the positions beyond any fixed maximum."""
    case = Case(256, "e4m3", (200,), (11,), 6)
    for position in range(200):
        at = case.address(0, position)
        case.cache.np[at : at + 256] = 0x10 + 6 * (position // 16)  # all dims of a key alike
    case.q[:] = np.abs(case.q)
    case.check(case.run(), live=(0,))


def test_broken_contracts_are_left_out():
    """A length or a query above the contract's: nothing is written."""
    case = Case(256, "e4m3", (90, 40, 20), (10, 30, 20), 6, over={"max_len": 60, "max_query": 25})
    case.check(case.run(), live=(2,))


def test_a_length_below_the_query_gives_zeros():
    """The first rows of such a request see nothing."""
    case = Case(256, "e4m3", (6, 40), (10, 12), 6)
    out = case.run()
    assert (out[:4] == 0).all()
    assert np.isfinite(out[4:10].astype(float)).all()
    case.check(np.where(np.arange(len(out))[:, None, None] < 10, SENTINEL, out), live=(1,))


@pytest.mark.parametrize("kv", ["fp16", "e5m2"])
def test_nan_inside_a_request_comes_out(kv):
    """A NaN value reaches every row that sees it, and no other request."""
    case = Case(256, kv, (40, 60), (20, 5), 2)
    at = case.address(0, 30) + case.row  # V of position 30, the first dims
    case.cache.np[at : at + 2] = NAN_BYTE[kv]
    out = case.run()
    assert np.isnan(out[10:20, :, 0]).all()
    case.check(np.where(np.arange(len(out))[:, None, None] < 20, SENTINEL, out), live=(1,))
