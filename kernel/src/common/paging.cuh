// Where a token of a request lies in the paged cache.
//
// Pages are a multiple of 16 tokens, so the 16 tokens of a group (group = position / 16) always
// share a page. Division by the page size is a multiply with a host-computed factor.
#pragma once
#include "common/memory.cuh"

namespace sm70 {

// Page sizes as the device needs them: page = group / groups_per_page.
// magic = 2^32 / groups_per_page + 1 (0 when groups_per_page is 1): exact while
// group * groups_per_page < 2^32, that is for any position below 2^20 with pages below 2^20.
struct PageShape {
  int groups_per_page;
  u32 magic;
};

struct GroupPlace {
  int column;  // of the block table
  int row;     // first token of the group inside its page
};

__device__ __forceinline__ GroupPlace place_group(int group, PageShape shape) {
  const int page = shape.magic ? static_cast<int>(__umulhi(group, shape.magic)) : group;
  return {page, (group - page * shape.groups_per_page) * 16};
}

// A block-table entry as a page number that is safe to address: a negative or too large entry
// (stale memory, a caller's mistake) reads some page of the cache instead of foreign memory.
__device__ __forceinline__ int safe_page(int entry, int num_pages) {
  return min(max(entry, 0), num_pages - 1);
}

}  // namespace sm70
