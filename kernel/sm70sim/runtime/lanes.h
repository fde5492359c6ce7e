// Cross-lane instructions, warp and block control that a translated kernel calls.
#pragma once
#include "memory.h"

enum Shfl { kIdx = 0, kUp = 1, kDown = 2, kBfly = 3 };
u32 shfl(int mode, const u32* a, const u32* b, const u32* cc, u32* out,
         u32 m);  // returns the predicate

// scheduler.cpp
bool yield_release(Warp& w, u32 act);
void bar_arrive(Ctx& c, Warp& w, u32 id, u32 count, u32 pc, u32 mask, bool sync, bool red,
                u32 pval);
