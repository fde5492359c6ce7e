// Which tile a CTA has, found on the device from the lengths alone: no plan, no host sync.
#pragma once

#include "common/paging.cuh"
#include "prefill/shape.cuh"

namespace sm70 {

// Tiles are numbered through the requests of the batch, and within a request from its last rows to
// its first, so that the tiles with most positions start first.  The grid holds at least as many
// CTAs as there are tiles; the rest get false.  Every warp computes this for itself.
template <class S>
__device__ __forceinline__ bool find_tile(const PrefillArgs& a, int number, PrefillTile* tile) {
  const int lane = threadIdx.x & 31;
  for (int first = 0; first < a.requests; first += 32) {
    const int r = first + lane;
    int start = 0, tokens = 0, len = 0;
    if (r < a.requests) {
      start = a.query_start_loc[r];
      tokens = a.query_start_loc[r + 1] - start;
      len = a.seq_lens[r];
    }
    // What breaks the caller's contract is left out rather than read out of bounds.
    const bool live = tokens > 0 && tokens <= a.max_query_len && start >= 0 &&
                      start + tokens <= a.tokens && len > 0 && len <= a.max_seq_len;
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
      tile->table = a.block_table + (first + who) * a.table_stride;
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

// Walks over the pages of a request: where 16-token group `index` lies. The page number of the
// group wanted next is asked for one step ahead of its use.
struct PageWalk {
  const int* table;
  int last_group, num_pages;
  PageShape shape;
  int entry, row;  // of the group asked for last

  __device__ __forceinline__ PageWalk(const PrefillArgs& a, const PrefillTile& tile)
      : table(tile.table),
        last_group((tile.len - 1) >> 4),
        num_pages(a.num_pages),
        shape{a.groups_per_page, a.page_magic},
        entry(0),
        row(0) {}
  // Groups past the end read the last one: what they give is masked.
  __device__ __forceinline__ void ask(int index) {
    const GroupPlace place = place_group(min(index, last_group), shape);
    row = place.row;
    entry = table[place.column];
  }
  __device__ __forceinline__ const u8* at(const u8* base, long long page_stride,
                                          int token_stride) const {
    return base + safe_page(entry, num_pages) * page_stride +
           row * static_cast<long long>(token_stride);
  }
};

}  // namespace sm70
