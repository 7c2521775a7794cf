// Thread blocks in software: the primitives of cuda/kernels/sm80_imma/primitives.cuh, so that a
// kernel runs on a host, deterministic and without a GPU.
//
//   simt::Launch      blocks one after the other; a thread of a block is a fibre
//   a fibre           runs until it has to wait: at a barrier, or for the other lanes of its warp
//   shared memory     knows who wrote and read each byte since the last barrier (shared_memory.h)
//   cp.async          copies when the thread waits for it, the latest moment that PTX allows
//
// What a GPU would leave to chance is a claim that fails: a race, a read of what was not written or
// has not arrived, lanes of a warp that are not together at an instruction of the whole warp, a
// barrier that not all threads reach.

#ifndef JAXFP8_TESTS_CUDA_SIMT_H_
#define JAXFP8_TESTS_CUDA_SIMT_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

#include "common/platform.h"
#include "tests/cuda/fibre.h"
#include "tests/cuda/shared_memory.h"

#define JAXFP8_DEVICE inline

namespace jaxfp8::cuda {

struct BlockIndex {
  int32_t x, y, z;
};

namespace simt {

constexpr int kLanes = 32;

struct AsyncCopy {
  uint32_t to;
  const void* from;
  int bytes;
};

struct Thread {
  explicit Thread(int index) : index(index) {}
  int index;
  Fibre fibre;
  std::vector<AsyncCopy> open;                // not in a group yet
  std::deque<std::vector<AsyncCopy>> groups;  // oldest first
  // Waits for this count to change from what it was.
  const uint64_t* gate = nullptr;
  uint64_t seen = 0;
};

// Threads that meet: the lanes of a warp, or all of a block.
struct Meeting {
  int arrived = 0;
  uint64_t rounds = 0;
  const char* what = "";
  void* given[kLanes] = {};
};

struct Block {
  BlockIndex index;
  std::deque<Thread> threads;
  std::vector<Meeting> warps;
  Meeting all;
  SharedMemory shared;
};

inline Block* block = nullptr;
inline Thread* thread = nullptr;

inline void WaitFor(const uint64_t& gate) {
  thread->gate = &gate, thread->seen = gate;
  thread->fibre.Pause();
}

// Runs `compute` once the whole warp is here, on what each lane gave.
template <typename Given, typename Compute>
void Together(const char* what, Given given, Compute compute) {
  Meeting& warp = block->warps[thread->index / kLanes];
  const bool apart = warp.arrived > 0 && std::strcmp(warp.what, what) != 0;
  Claim(!apart, "all lanes of a warp are at the same instruction");
  if (apart) return WaitFor(warp.rounds);  // for ever
  warp.what = what;
  warp.given[thread->index % kLanes] = &given;
  if (++warp.arrived < kLanes) return WaitFor(warp.rounds);
  Given* lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<Given*>(warp.given[i]);
  compute(lanes);
  warp.arrived = 0, ++warp.rounds;
}

// Runs threads in turns until all have ended; returns whether they have.
inline bool RunBlock() {
  for (size_t left = block->threads.size(); left > 0;) {
    bool moved = false;
    for (Thread& next : block->threads) {
      if (next.fibre.done() || (next.gate && *next.gate == next.seen)) continue;
      thread = &next, next.gate = nullptr, moved = true;
      next.fibre.Resume();
      left -= next.fibre.done();
    }
    if (!moved) return false;
  }
  return true;
}

// Runs `kernel` in each thread of each block of a grid, and says how shared memory was accessed.
inline BankCounts Launch(BlockIndex grid, int threads, int shared_bytes,
                         const std::function<void()>& kernel) {
  BankCounts counts;
  for (int i = 0; i < grid.x * grid.y * grid.z; ++i) {
    const BlockIndex index{i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    Block running{
        index, {}, std::vector<Meeting>(threads / kLanes), {}, SharedMemory(shared_bytes)};
    block = &running;
    for (int t = 0; t < threads; ++t) running.threads.emplace_back(t).fibre.Start(kernel);
    Claim(RunBlock(), "all threads reach every barrier and instruction of their warp");
    running.shared.banks().AddTo(counts);
  }
  return counts;
}

}  // namespace simt

inline int ThreadIndex() { return simt::thread->index; }
inline BlockIndex ThisBlock() { return simt::block->index; }
inline uint32_t DynamicShared() { return simt::SharedMemory::kBase; }

inline void SyncThreads() {
  simt::Block& block = *simt::block;
  if (++block.all.arrived < static_cast<int>(block.threads.size())) {
    return simt::WaitFor(block.all.rounds);
  }
  block.all.arrived = 0, ++block.all.rounds;
  block.shared.EndEpoch();
}

template <int kWords>
void LoadShared(uint32_t from, uint32_t (&to)[kWords]) {
  simt::block->shared.Read(simt::Access::kLoad, ThreadIndex(), from, to, sizeof(to));
}

template <int kWords>
void StoreShared(uint32_t to, const uint32_t (&from)[kWords]) {
  simt::block->shared.Write(ThreadIndex(), to, from, sizeof(from));
}

inline void CopyAsync16(uint32_t to, const void* from, int bytes) {
  simt::Claim(reinterpret_cast<uintptr_t>(from) % 16 == 0, "cp.async reads aligned chunks");
  simt::block->shared.BeginCopy(ThreadIndex(), to, 16);
  simt::thread->open.push_back({to, from, bytes});
}

inline void CommitCopies() {
  simt::thread->groups.push_back(std::move(simt::thread->open));
  simt::thread->open.clear();
}

template <int kPending>
void WaitForCopies() {
  auto& groups = simt::thread->groups;
  for (; groups.size() > size_t{kPending}; groups.pop_front()) {
    for (const simt::AsyncCopy& copy : groups.front()) {
      uint8_t chunk[16] = {};
      std::memcpy(chunk, copy.from, static_cast<size_t>(copy.bytes));
      simt::block->shared.EndCopy(ThreadIndex(), copy.to, chunk, 16);
    }
  }
}

inline void LoadMatrices(uint32_t row, uint32_t (&to)[4]) {
  struct Given {
    int thread;
    uint32_t row;
    uint32_t* to;
  };
  const auto load = [](Given** lanes) {
    for (int i = 0; i < 4; ++i) {
      for (int r = 0; r < 8; ++r) {
        const Given& of_row = *lanes[8 * i + r];
        uint32_t words[4];
        simt::block->shared.Read(simt::Access::kMatrix, of_row.thread, of_row.row, words, 16);
        for (int t = 0; t < 4; ++t) lanes[4 * r + t]->to[i] = words[t];
      }
    }
  };
  simt::Together("ldmatrix", Given{ThreadIndex(), row, to}, load);
}

// As the PTX ISA has the fragments of mma.m16n8k32 for 8-bit integers.
inline void MultiplyCodes(int32_t (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Given {
    int32_t* acc;
    const uint32_t *a, *b;
  };
  const auto multiply = [](Given** lanes) {
    int8_t left[16][32], right[8][32];
    for (int lane = 0; lane < simt::kLanes; ++lane) {
      const int group = lane / 4, k = lane % 4 * 4;
      for (int byte = 0; byte < 4; ++byte) {
        const auto code = [&](uint32_t word) { return static_cast<int8_t>(word >> (8 * byte)); };
        for (int i = 0; i < 4; ++i) {
          left[group + i % 2 * 8][k + i / 2 * 16 + byte] = code(lanes[lane]->a[i]);
        }
        for (int i = 0; i < 2; ++i) right[group][k + i * 16 + byte] = code(lanes[lane]->b[i]);
      }
    }
    for (int lane = 0; lane < simt::kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        int32_t sum = 0;
        for (int k = 0; k < 32; ++k) sum += left[row][k] * right[column][k];
        lanes[lane]->acc[i] += sum;
      }
    }
  };
  simt::Together("mma", Given{acc, a, b}, multiply);
}

inline uint32_t MaxOfWarp(uint32_t value) {
  const auto reduce = [](uint32_t*** lanes) {
    uint32_t largest = 0;
    for (int i = 0; i < simt::kLanes; ++i) largest = std::max(largest, ***(lanes + i));
    for (int i = 0; i < simt::kLanes; ++i) ***(lanes + i) = largest;
  };
  uint32_t* mine = &value;
  simt::Together("redux", mine, reduce);
  return value;
}

inline void LoadGlobal16(const void* from, uint32_t (&to)[4]) {
  const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
  simt::Claim(aligned, "global memory is loaded aligned");
  std::memcpy(to, from, sizeof(to));
}

inline void StoreSums(int32_t* to, const int32_t (&sums)[4]) {
  simt::Claim(reinterpret_cast<uintptr_t>(to) % 16 == 0, "sums are stored aligned");
  std::copy(sums, sums + 4, to);
}

inline void AddToSums(int32_t* to, const int32_t (&sums)[4]) {
  for (int i = 0; i < 4; ++i) to[i] += sums[i];
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_TESTS_CUDA_SIMT_H_
