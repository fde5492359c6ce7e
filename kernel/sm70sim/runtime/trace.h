// The trace of a launch: what the cycle model needs of every executed block, in 32-bit words.
//
// File: per thread block the words kTraceMagic, block number, warps; per warp: instructions,
// number of words, words.  A warp's words are blocks of straight-line code in order:
//   block index, active mask, then for each of its instructions in order
//     its mask, if it has a guard predicate
//     one record, if it is of such a kind and its mask is not 0:
//       shared access  wavefronts
//       local access   wavefronts
//       global access  number of 128-byte lines, then per line two words of
//                      line number << 12 | lanes << 4 | mask of 32-byte sectors
//       generic access as global, or wavefronts | kTraceShared or kTraceLocal
//       BAR            barrier number | threads << 8
#pragma once
#include <stdio.h>

#include "base.h"

constexpr u32 kTraceMagic = 0x32544143u, kTraceShared = 0x80000000u, kTraceLocal = 0x40000000u;
void trace_emit(FILE* f, const Cta& t);
