// Parameters of the machine: the numbers of v100.toml, by the same names.
#pragma once
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

// clang-format off
#define CONFIG(X) \
  X(machine_sms) X(machine_core_mhz) X(machine_memory_mhz) X(machine_l2_slices) \
  X(machine_channels) X(machine_max_warps) X(machine_max_ctas) X(machine_shared_bytes) \
  X(machine_l1_bytes) X(machine_registers) X(launch_cta_start) X(issue_branch) \
  X(issue_operands_read) X(issue_barrier) X(issue_l0_lines) X(issue_l0_miss) \
  X(issue_l0_next_line) X(issue_l0_fetch) X(memory_pipe_mio_queue) \
  X(memory_pipe_loads_in_flight) X(memory_pipe_stores_in_flight) \
  X(memory_pipe_issue_to_pipe) X(memory_pipe_lds) X(memory_pipe_shfl) X(memory_pipe_ldc) \
  X(memory_pipe_read_release) X(l1_latency) X(l1_ways) X(l1_miss) X(l1_request_line) \
  X(l1_write_sector) X(l1_return_sector) X(l2_crossbar) X(l2_latency) X(l2_sector) \
  X(l2_sets) X(l2_ways) X(l2_atomic_lane) X(dram_efficiency) X(dram_latency) \
  X(dram_write_cost) X(dram_write_queue) X(pipes_TENSOR_forward)
// clang-format on

struct Config {
#define X(name) double name = -1;
  CONFIG(X)
#undef X
  // Cycles that a DRAM channel needs for a 32-byte sector: 16 bytes wide, double data rate.
  double channel_sector() const {
    double bytes_per_cycle = 2 * 16 * machine_memory_mhz / machine_core_mhz;
    return 32 / bytes_per_cycle / dram_efficiency;
  }
  // False: there is no such parameter.
  bool set(const char* name, double value) {
#define X(field) \
  if (!strcmp(name, #field)) return field = value, true;
    CONFIG(X)
#undef X
    return false;
  }
  // The first parameter that was not set, or NULL.
  const char* missing() const {
#define X(field) \
  if (field < 0) return #field;
    CONFIG(X)
#undef X
    return nullptr;
  }
};
