// Prefill attention for sm_70: any number of query tokens over a paged cache with a past, causal, on
// tensor cores.  HEAD_DIM (64, 128, 256) and KV (FP16, E4M3, E5M2) select the instantiation.
#include "prefill/score.cuh"
#include "prefill/value.cuh"

// Grid: (at least the number of tiles, KV heads).  256 threads, Shape::kSmemBytes of dynamic shared
// memory.
extern "C" __global__ void __launch_bounds__(256, 1)
    prefill_attention(const __grid_constant__ prefill::Args a) {
  using S = prefill::Shape<HEAD_DIM, prefill::KV>;
  extern __shared__ __align__(128) prefill::u8 memory[];
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));  // volatile: else the loops read it again
  prefill::Tile tile;
  if (!prefill::find_tile<S>(a, blockIdx.x, blockIdx.y, &tile)) return;
  const prefill::u32 smem = prefill::shared_address(memory);
  if (tid < 128) prefill::score_role<S>(a, tile, blockIdx.y, smem, tid);
  else prefill::value_role<S>(a, tile, blockIdx.y, smem, tid - 128);
}
