// Reads the trace that the emulator writes (runtime/trace.h describes the words).
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vector>

#include "config.h"

constexpr u32 kTraceMagic = 0x32544143u, kTraceShared = 0x80000000u, kTraceLocal = 0x40000000u;

enum Record : u8 { kNoRecord, kSharedRecord, kGlobalRecord, kLocalRecord, kBarRecord };

// In the order of PIPES in parameters.py.
enum Pipe : u8 {
  ALU,
  FMA,
  FP16,
  FP64,
  XU,
  TENSOR,
  CTL,
  SHARED,
  LOAD,
  STORE,
  ATOMIC,
  SHUFFLE,
  CONSTANT,
  MISC,
  BARRIER,
  FENCE,
  NONE,
  kPipes
};
inline bool on_memory_pipe(Pipe p) { return p >= SHARED && p <= MISC; }

// What is known of an instruction without running it; mirrored in timing.py.
struct InstrT {
  Pipe pipe;
  u8 stall, wbar, rbar, wait;  // control bits
  u8 nbytes;                   // per lane of an access
  Record record;
  u8 guarded;  // its mask is in the trace
  u8 latency, interval;
  u8 bank_conflict;  // extra cycles for three sources in one register bank
  u8 arrives_only;   // BAR.ARV
  u8 bypasses_l1;
};
struct BlockT {
  u32 first, len;
};

class Trace {
 public:
  std::vector<size_t> ctas;  // word at which each thread block starts
  const u32* words = nullptr;

  // False: the file cannot be read or is no trace.
  bool open(const char* path) {
    int fd = ::open(path, O_RDONLY);
    if (fd < 0) return false;
    struct stat st;
    fstat(fd, &st);
    bytes_ = (size_t)st.st_size;
    void* p = bytes_ ? mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
    close(fd);
    if (p == MAP_FAILED) return false;
    words = (const u32*)p;
    for (size_t at = 0, n = bytes_ / 4; at + 3 <= n;) {
      if (words[at] != kTraceMagic) return false;
      ctas.push_back(at);
      u32 warps = words[at + 2];
      at += 3;
      for (u32 i = 0; i < warps; i++) at += 2 + (size_t)words[at + 1];
    }
    return true;
  }
  ~Trace() {
    if (words) munmap((void*)words, bytes_);
  }

 private:
  size_t bytes_ = 0;
};
