// HMMA.884: the steps of mma.sync.m8n8k4 as sm_70 executes them.
//
// Layouts follow the PTX ISA: quadpair q is lanes 4q..4q+3 (group g = 0) and 16+4q.. (g = 1).
// A ".row": lane t of group g holds A[4g+t][0..3]; ".col": lane t holds A[4g+0..3][t].
// B ".col": lane t of group g holds B[0..3][4g+t]; ".row": lane t holds B[t][4g+0..3].
// FP32 accumulators: register i of lane (g, t) is row 4g + (t&1) + (i&2), column (i&4) + (t&2) +
// (i&1); step s computes registers 2s and 2s+1.  FP16: half i is row 4g+t, column i; step s has
// halves 4s..4s+3.
#pragma once
#include "float.h"

// Registers of A, B, C (two each) and where the step's two registers of D go.
template <bool ACOL, bool BCOL, int STEP>
void hmma_f32(const u32* a0, const u32* a1, const u32* b0, const u32* b1, const u32* c0,
              const u32* c1, u32* d0, u32* d1);
template <bool ACOL, bool BCOL, int STEP>
void hmma_f16(const u32* a0, const u32* a1, const u32* b0, const u32* b1, const u32* c0,
              const u32* c1, u32* d0, u32* d1);

alignas(64) static const u32 kZeroRow[32] = {0};
