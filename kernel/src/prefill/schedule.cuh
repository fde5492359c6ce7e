// Which tile a CTA has, found on the device from the lengths alone: no plan, no host sync.
#pragma once

#include "shape.cuh"

namespace prefill {

// Tiles are numbered through the requests of the batch, and within a request from its last rows to
// its first, so that the tiles with most positions start first.  The grid holds at least as many
// CTAs as there are tiles; the rest get false.  Every warp computes this for itself.
template <class S>
__device__ __forceinline__ bool find_tile(const Args& a, int number, int kv_head, Tile* tile) {
  const int lane = threadIdx.x & 31;
  for (int first = 0; first < a.requests; first += 32) {
    const int r = first + lane;
    int start = 0, tokens = 0, len = 0;
    if (r < a.requests) {
      start = a.query_start[r];
      tokens = a.query_start[r + 1] - start;
      len = a.seq_lens[r];
    }
    const bool live = tokens > 0 && len > 0 && len <= a.max_len;
    const int tiles = live ? (tokens * a.group + S::kRows - 1) / S::kRows : 0;
    int upto = tiles;  // tiles of this request and those before it
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      int x = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += x;
    }
    const u32 later = __ballot_sync(~0u, upto > number);
    if (later) {
      const int who = __ffs(later) - 1;
      tokens = __shfl_sync(~0u, tokens, who);
      tile->first_token = __shfl_sync(~0u, start, who);
      tile->len = __shfl_sync(~0u, len, who);
      tile->first_row = (__shfl_sync(~0u, upto, who) - 1 - number) * S::kRows;
      tile->rows = tokens * a.group;
      tile->past = tile->len - tokens;
      tile->pages = a.block_table + (long long)(first + who) * a.table_row;
      const int last_row = min(tile->first_row + S::kRows, tile->rows) - 1;
      // A length below the query's leaves rows that see nothing: they come out as zeros.
      const int most = max(tile->past + divide(last_row, a.group_magic) + 1, 0);
      const int least = max(tile->past + divide(tile->first_row, a.group_magic) + 1, 0);
      tile->steps = (most + S::kStep - 1) / S::kStep;
      tile->full_steps = least / S::kStep;
      return true;
    }
    number -= __shfl_sync(~0u, upto, 31);
  }
  return false;
}

// Walks over the pages of a request: where 16-token group `index` lies.  The page number of the next
// group wanted is asked for one step ahead of its use.
struct PageWalk {
  const int* pages;
  int last_group, page_groups;
  u32 magic;
  int page, row;  // of the group asked for last

  __device__ __forceinline__ PageWalk(const Args& a, const Tile& tile)
      : pages(tile.pages), last_group((tile.len - 1) >> 4), page_groups(a.page_groups),
        magic(a.page_magic), page(0), row(0) {}
  // Groups past the end read the last one: what they give is masked.
  __device__ __forceinline__ void ask(int index) {
    index = min(index, last_group);
    const int n = divide(index, magic);
    row = (index - n * page_groups) * 16;
    page = pages[n];
  }
  __device__ __forceinline__ const u8* at(const u8* base, long long page_bytes,
                                          int token_bytes) const {
    return base + page * page_bytes + (long long)row * token_bytes;
  }
};

}  // namespace prefill
