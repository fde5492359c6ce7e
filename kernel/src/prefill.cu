// Prefill attention for sm_70: any number of query tokens over a paged cache with a past, causal.
//
// One CTA has one request, one KV head and 64 (D = 256) or 128 query rows, row = query token *
// group
// + head of the group, so that a KV element that it reads serves every head of the group. It walks
// over the positions in steps of 32. Warps 0-3 hold Q in registers and compute S = Q K^T and the
// softmax (score.cuh); warps 4-7 hold O in registers and compute O = P V (value.cuh); P goes
// through two buffers in shared memory, so that both kinds of warps keep the tensor pipes busy.
// Nothing is split over CTAs: the bits of a request depend on its own rows and length alone.
//
// Grid: x at least the number of tiles (schedule.cuh), y KV heads.
// Compile with -DHEAD_DIM={64,128,256} -DKV={FP16,E4M3,E5M2}.
#include "prefill/score.cuh"
#include "prefill/value.cuh"

extern "C" __global__ void __launch_bounds__(sm70::kPrefillThreads, 1)
    prefill_attention(const __grid_constant__ sm70::PrefillArgs a) {
  using namespace sm70;
  using S = PrefillShape<HEAD_DIM, KV>;
  extern __shared__ __align__(128) u8 memory[];
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // volatile: else the loops read it again
  PrefillTile tile;
  if (!find_tile<S>(a, blockIdx.x, &tile)) return;
  const u32 shared = shared_address(memory);
  if (thread < 128)
    score_role<S>(a, tile, blockIdx.y, shared, thread);
  else
    value_role<S>(a, tile, blockIdx.y, shared, thread - 128);
}
