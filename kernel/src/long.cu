// Long attention for sm_70: eight query tokens of 1 to 16 requests against long E4M3 caches.
//
// The work of a layer and KV head: 48 query rows (row = token * 6 + head of the group) of D 256,
// FP16, against a paged cache of E4M3. The floor on a V100 is memory: 512 bytes a token are 71
// cycles of an SM at 879 GB/s, while its tensor cores need 48. Everything else (conversion,
// softmax, shared memory) has to hide under those 71; docs/long-attention.md has the budget.
//
// Two kernels a call:
//   long_split  80 CTAs per KV head, one on each SM for the whole launch. A CTA works out which
//               leaves are its own (long_deal.cuh) and goes through them in runs of one request.
//               Four warps multiply K and keep the softmax (long_score.cuh); four multiply V
//               (long_value.cuh); P goes from the ones to the others through a double buffer in
//               shared memory, under named barriers (long_shared.cuh).
//   long_join_few, long_join_many
//               add the partial results of each request (long_join.cuh).
//
// What makes the operands fit Volta: mma.m8n8k4 takes four consecutive K values of one row from a
// lane. With S^T = K Q^T and O = P V, four consecutive dims of one cached token are the operand in
// both products, and four dims are one 32-bit word of E4M3: a lane converts exactly what it
// multiplies, with no exchange. The conversion is seven integer instructions a word and yields
// value / 256 (common/fp8.cuh); the 2^8 is folded into the softmax and output scales.
//
// Bits: a request's result depends on its own data and length alone. Leaves are parts of the
// request, folded in one order, by whichever CTA has them or by the join (long_fold.cuh).
//
// Stale bytes behind a request's end convert to finite numbers whatever they are, so P = 0 masks
// them. A NaN byte (0x7f, 0xff) inside the length reads as +-480: the cache writer saturates at
// 448, and telling NaN apart would cost three more instructions a word. docs/long-attention.md.
//
// Compile with -DKEY_ALIGN=16, or 8 for caches whose K is only 8-byte aligned.
#include "common/memory.cuh"
#include "common/paging.cuh"
#include "long_join.cuh"
#include "long_score.cuh"
#include "long_value.cuh"

namespace sm70 {

// 16 bytes of Q, or zero where `live` is false: one predicated load, no branch.
__device__ __forceinline__ uint4 load_query(bool live, const __half* p) {
  uint4 v;
  asm volatile(
      "{.reg .pred live; setp.ne.u32 live,%5,0;\n"
      "mov.u32 %0,0; mov.u32 %1,0; mov.u32 %2,0; mov.u32 %3,0;\n"
      "@live ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<u32>(live)));
  return v;
}

// Q of a run into shared memory, in the order of multiplication: dims 0 2 1 3 of every four, as
// the conversion of K leaves them. By the value warps, who have nothing else to do yet. All CTAs of
// a request want the same 24 KB at the same time: each begins elsewhere, so that they do not queue
// at one slice of L2 after the other.
__device__ __forceinline__ void stage_query(const LongArgs& args, LongShared& sh,
                                            const LongRequest& request, int thread, int head) {
  const int lane = opaque(thread & 31), warp = opaque((thread >> 5 ^ blockIdx.x) & 3);
  const __half* q = static_cast<const __half*>(args.q) + request.first_token * args.q_token_stride +
                    head * kLongGroup * args.q_head_stride;
  int tile = (blockIdx.x >> 2) % 6;  // of eight rows
  uint4 x[12];
#pragma unroll
  for (int j = 0; j < 12; j += 2, tile = tile == 5 ? 0 : tile + 1) {
    const int row = tile * 8 + (lane & 7), token = row / kLongGroup;
    const __half* p = q + token * args.q_token_stride +
                      (row - token * kLongGroup) * args.q_head_stride + (lane >> 3) * 8 + warp * 32;
    x[j] = load_query(token < request.tokens, p);
    x[j + 1] = load_query(token < request.tokens, p + 128);
  }
  u8* to = sh.query + ((lane >> 3) + warp * 4) * kQueryStepBytes + (lane & 7) * 16;
  tile = (blockIdx.x >> 2) % 6;
#pragma unroll
  for (int j = 0; j < 12; j++) {
    *reinterpret_cast<uint4*>(to + (j & 1) * 16 * kQueryStepBytes + tile * 128) =
        make_uint4(__byte_perm(x[j].x, x[j].y, 0x5410), __byte_perm(x[j].x, x[j].y, 0x7632),
                   __byte_perm(x[j].z, x[j].w, 0x5410), __byte_perm(x[j].z, x[j].w, 0x7632));
    if (j & 1) tile = tile == 5 ? 0 : tile + 1;
  }
}

// The part of a run, from leaf `first` on, whose group offsets fit the table; whole blocks as far
// as possible. Returns the leaf behind it.
__device__ __forceinline__ int part_end(const LongRun& run, int first) {
  const int begin = run.request.leaf_begin(first);
  int last = run.last;
  while (run.request.leaf_begin(last) - begin > kMaxRunGroups / kLongTileGroups)
    last = (last & (kLongBlock - 1)) ? last & -kLongBlock : last - kLongBlock;
  return last;
}

template <int KeyAlign>
__device__ __forceinline__ void split(const LongArgs& args, LongShared& sh) {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // once: loops would read it again and again
  const bool scores = thread < kRoleThreads;
  if (thread < 32) {
    const int count = deal_runs(args, blockIdx.x, sh.runs);
    if (thread == 0) sh.run_count = count;
  }
  __syncthreads();

  // What lives across a part is kept small, and read again instead: the roles need every register.
  for (int i = 0, next_leaf = -1; i < sh.run_count;) {
    const int head = opaque(blockIdx.z);
    const u8* head_keys = args.k + static_cast<size_t>(head) * args.k_head_stride;
    const u8* head_values = args.v + static_cast<size_t>(head) * args.v_head_stride;
    LongRun run = load_run(sh.runs, i);
    const bool new_request = next_leaf < 0;
    if (!new_request) run.first = next_leaf;
    run.last = part_end(run, run.first);
    const LongRequest& request = run.request;
    const int begin_tile = request.leaf_begin(run.first);
    const int first_group = begin_tile * kLongTileGroups;
    const int groups = min(request.leaf_begin(run.last) * kLongTileGroups,
                           (request.len + kLongGroupTokens - 1) / kLongGroupTokens) -
                       first_group;
    const int head_slot = (run.index * gridDim.z + head) * args.slots;
    const int* table = args.block_table + run.index * args.table_stride;
    auto entry_of = [&](const GroupPlace& place) {
      return static_cast<int>(load_stream32(table + place.column));
    };
    auto page_of = [&](int entry) {
      return static_cast<long long>(safe_page(entry, args.num_pages));
    };
    const PageShape pages = {args.groups_per_page, args.page_magic};

    if (i > 0 || !new_request) __syncthreads();  // the tables of the part before are used up
    KeyStage<KeyAlign> stage;
    const int warp = thread >> 5 & 3;
    const u8* keys = head_keys + KeyStage<KeyAlign>::lane_offset(thread & 31, args.k_token_stride);
    if (scores) {
      if (warp < groups) {  // the first K, before all else
        const GroupPlace place = place_group(first_group + warp, pages);
        stage.load(keys + page_of(entry_of(place)) * args.k_page_stride +
                       static_cast<long long>(place.row) * args.k_token_stride,
                   args.k_token_stride);
      }
    } else {
      // The first entry is asked for before Q, or it would wait behind Q and K of all SMs.
      int g = thread - kRoleThreads;
      GroupPlace place = place_group(first_group + g, pages);
      int entry = g < groups ? entry_of(place) : 0;
      if (new_request) stage_query(args, sh, request, thread, head);
      while (g < groups) {
        const long long page = page_of(entry);
        sh.key_offset[g] = static_cast<u32>(
            (page * args.k_page_stride + static_cast<long long>(place.row) * args.k_token_stride) >>
            3);
        sh.value_offset[g] = static_cast<u32>(
            (page * args.v_page_stride + static_cast<long long>(place.row) * args.v_token_stride) >>
            3);
        g += kRoleThreads;
        if (g < groups) place = place_group(first_group + g, pages), entry = entry_of(place);
      }
    }
    __syncthreads();
    if (scores) {
      score_run<KeyAlign>(args, sh, run, begin_tile, groups, keys, stage, thread, head_slot);
    } else {
      value_run(args, sh, run, begin_tile, groups, head_values, thread, head_slot);
    }
    next_leaf = run.last;
    if (next_leaf == load_run(sh.runs, i).last) i++, next_leaf = -1;
  }
}

}  // namespace sm70

extern "C" __global__ void __launch_bounds__(sm70::kLongThreads, 1)
    long_split(const __grid_constant__ sm70::LongArgs args) {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  sm70::split<KEY_ALIGN>(args, *reinterpret_cast<sm70::LongShared*>(dynamic_shared));
}

extern "C" __global__ void __launch_bounds__(sm70::kLongJoinFewThreads, 2)
    long_join_few(const __grid_constant__ sm70::LongArgs args) {
  __shared__ sm70::JoinShared shared;
  sm70::join_results<2>(args, shared);
}

extern "C" __global__ void __launch_bounds__(sm70::kLongJoinManyThreads, 3)
    long_join_many(const __grid_constant__ sm70::LongArgs args) {
  __shared__ sm70::JoinShared shared;
  sm70::join_results<1>(args, shared);
}
