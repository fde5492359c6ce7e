// Which sub-cores have something to do at which cycle.
#pragma once
#include <map>
#include <vector>

#include "config.h"

class Calendar {
 public:
  explicit Calendar(u32 ids) : words_((ids + 63) / 64), ring_((size_t)kNear * words_, 0) {}
  // Times before the current cycle count as the current one; an id may be entered repeatedly.
  void enter(u32 id, u64 time) {
    if (time < now_) time = now_;
    if (time - now_ >= kNear) {
      far_.emplace(time, id);
      return;
    }
    u64 &slot = ring_[(time % kNear) * words_ + id / 64], bit = 1ull << (id % 64);
    pending_ += !(slot & bit);
    slot |= bit;
  }
  // Advances to the next cycle at which something is entered, calls visit(id) in ascending
  // order and returns true; false: nothing is left.
  template <class Visit>
  bool next(Visit visit) {
    for (;;) {
      while (!far_.empty() && far_.begin()->first - now_ < kNear) {
        auto e = *far_.begin();
        far_.erase(far_.begin());
        enter(e.second, e.first);
      }
      u64* slot = &ring_[(now_ % kNear) * words_];
      bool any = false;
      for (u32 w = 0; w < words_; w++)
        while (slot[w]) {  // entries for this cycle made by visit are served too
          u32 bit = (u32)__builtin_ctzll(slot[w]);
          slot[w] &= ~(1ull << bit);
          pending_--;
          visit(w * 64 + bit);
          any = true;
        }
      if (any) {
        now_++;
        return true;
      }
      if (pending_)
        now_++;
      else if (!far_.empty())
        now_ = far_.begin()->first;
      else
        return false;
    }
  }
  u64 now() const { return now_; }

 private:
  static constexpr u64 kNear = 4096;
  u32 words_;
  u64 now_ = 0, pending_ = 0;
  std::vector<u64> ring_;
  std::multimap<u64, u32> far_;
};
