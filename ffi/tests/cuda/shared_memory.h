// The shared memory of a block in software: its bytes, who accessed them, and the banks that each
// instruction of a warp hits.
//
// An epoch is what lies between two barriers. Two threads race if they access a byte in one epoch
// and one of them writes. That is stricter than PTX, where lanes of a warp may also order accesses
// among themselves.

#ifndef JAXFP8_TESTS_CUDA_SHARED_MEMORY_H_
#define JAXFP8_TESTS_CUDA_SHARED_MEMORY_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/expect.h"

namespace jaxfp8::cuda::simt {

// Where a test wants to see which claims fail, they are kept here and are no failures.
inline std::set<std::string>* caught = nullptr;

// Expect, for inner loops: makes no string unless the claim fails.
inline void Claim(bool holds, const char* claim) {
  if (holds) return;
  if (caught) {
    caught->insert(claim);
  } else {
    tests::Expect(false, claim);
  }
}

enum class Access { kLoad, kStore, kCopy, kMatrix };

// Instructions of warps by kind, and by how many cycles their bank conflicts prolong them.
struct BankCounts {
  std::map<Access, int64_t> instructions, conflicts;
};

// Groups accesses of lanes to instructions: the n-th of each lane belong together. A kernel whose
// lanes take different branches around an access has no such groups.
class Banks {
 public:
  explicit Banks(int threads) : issued_(threads), warps_((threads + 31) / 32) {}

  void Add(Access kind, int thread, uint32_t address, int bytes) {
    Warp& warp = warps_[thread / 32];
    const size_t at = issued_[thread]++ - warp.first;
    while (warp.open.size() <= at) warp.open.push_back({kind, bytes, 0, {}});
    Instruction& instruction = warp.open[at];
    Claim(instruction.kind == kind && instruction.bytes == bytes,
          "the lanes of a warp access shared memory in one order");
    instruction.address[thread % 32] = address;
    if (++instruction.lanes < 32) return;
    Count(instruction);
    for (; !warp.open.empty() && warp.open.front().lanes == 32; ++warp.first) warp.open.pop_front();
  }

  void AddTo(BankCounts& counts) const {
    for (const auto& [kind, n] : counts_.instructions) counts.instructions[kind] += n;
    for (const auto& [kind, n] : counts_.conflicts) counts.conflicts[kind] += n;
    for (const Warp& warp : warps_) {
      Claim(warp.open.empty(), "all lanes of a warp take part in each access");
    }
  }

 private:
  struct Instruction {
    Access kind;
    int bytes, lanes;
    uint32_t address[32];
  };
  struct Warp {
    size_t first = 0;  // the number of the first open instruction
    std::deque<Instruction> open;
  };

  // 128 bytes a cycle: with 16 bytes a lane, eight lanes at a time. Lanes that access one word
  // share its bank.
  void Count(const Instruction& instruction) {
    const int together = std::min(32, 128 / instruction.bytes);
    ++counts_.instructions[instruction.kind];
    for (int first = 0; first < 32; first += together) {
      uint32_t words[32];
      int count = 0;
      for (int lane = first; lane < first + together; ++lane) {
        for (int i = 0; i < instruction.bytes; i += 4) {
          words[count++] = (instruction.address[lane] + static_cast<uint32_t>(i)) / 4;
        }
      }
      std::sort(words, words + count);
      int of_bank[32] = {};
      const uint32_t* end = std::unique(words, words + count);
      for (const uint32_t* word = words; word != end; ++word) ++of_bank[*word % 32];
      counts_.conflicts[instruction.kind] += *std::max_element(of_bank, of_bank + 32) - 1;
    }
  }

  std::vector<size_t> issued_;  // accesses of each thread
  std::vector<Warp> warps_;
  BankCounts counts_;
};

class SharedMemory {
 public:
  static constexpr uint32_t kBase = 1024;  // an address of 0 is a mistake
  static constexpr int kMostThreads = 1024;

  explicit SharedMemory(int bytes) : bytes_(bytes, 0xa5), state_(bytes), banks_(kMostThreads) {}

  void EndEpoch() { ++epoch_; }

  void Read(Access kind, int thread, uint32_t from, void* to, int bytes) {
    if (!Check(thread, from, bytes)) return;
    banks_.Add(kind, thread, from, bytes);
    const uint32_t at = from - kBase;
    for (uint32_t i = at; i < at + bytes; ++i) {
      State& s = state_[i];
      Claim(s.writer != kNobody, "what is read was written");
      Claim(!s.in_flight, "what is read has arrived");
      Claim(s.written < epoch_ || s.writer == thread, "no race of a read with a write");
      s.reader = s.read == epoch_ && s.reader != thread ? kMany : thread;
      s.read = epoch_;
    }
    std::memcpy(to, bytes_.data() + at, bytes);
  }

  void Write(int thread, uint32_t to, const void* from, int bytes) {
    if (!Check(thread, to, bytes)) return;
    banks_.Add(Access::kStore, thread, to, bytes);
    Take(thread, to, bytes);
    std::memcpy(bytes_.data() + (to - kBase), from, bytes);
  }

  void BeginCopy(int thread, uint32_t to, int bytes) {
    if (!Check(thread, to, bytes)) return;
    banks_.Add(Access::kCopy, thread, to, bytes);
    Take(thread, to, bytes);
    for (uint32_t i = to - kBase; i < to - kBase + bytes; ++i) state_[i].in_flight = true;
    std::memset(bytes_.data() + (to - kBase), 0xa5, bytes);
  }

  void EndCopy(int thread, uint32_t to, const void* from, int bytes) {
    for (uint32_t i = to - kBase; i < to - kBase + bytes; ++i) {
      State& s = state_[i];
      s.in_flight = false, s.writer = thread, s.written = epoch_;
    }
    std::memcpy(bytes_.data() + (to - kBase), from, bytes);
  }

  const Banks& banks() const { return banks_; }

 private:
  static constexpr int kNobody = -1, kMany = -2;
  struct State {
    int writer = kNobody, reader = kNobody;
    uint64_t written = 0, read = 0;  // in which epoch
    bool in_flight = false;
  };

  bool Check(int thread, uint32_t at, int bytes) const {
    const bool inside = at >= kBase && at - kBase + bytes <= bytes_.size();
    Claim(inside, "shared memory is accessed within its bounds");
    Claim(at % bytes == 0, "shared memory is accessed aligned");
    return inside && thread < kMostThreads;
  }

  // For a write.
  void Take(int thread, uint32_t to, int bytes) {
    for (uint32_t i = to - kBase; i < to - kBase + bytes; ++i) {
      State& s = state_[i];
      Claim(!s.in_flight, "nothing is written where a copy is to arrive");
      Claim(s.read < epoch_ || s.reader == thread || s.reader == kNobody,
            "no race of a write with a read");
      Claim(s.written < epoch_ || s.writer == thread, "no race of two writes");
      s.writer = thread, s.written = epoch_;
    }
  }

  std::vector<uint8_t> bytes_;
  std::vector<State> state_;
  Banks banks_;
  uint64_t epoch_ = 1;
};

}  // namespace jaxfp8::cuda::simt

#endif  // JAXFP8_TESTS_CUDA_SHARED_MEMORY_H_
