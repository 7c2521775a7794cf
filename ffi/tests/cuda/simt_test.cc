// The software behind `imma_kernel_test`: it finds the mistakes that it is there to find, in small
// kernels that each make one, and its instructions are those of the PTX ISA.

#include "tests/cuda/simt.h"

#include <functional>
#include <set>
#include <string>

#include "cuda/kernels/sm80_imma/primitives.cuh"

namespace jaxfp8::cuda {
namespace {

using tests::Expect;

constexpr int kThreads = 64, kSharedBytes = 4096;
alignas(16) uint8_t global[1024];

void Store(int word, uint32_t value) { StoreShared(DynamicShared() + 4 * word, {value}); }
uint32_t Load(int word) {
  uint32_t value[1] = {};
  LoadShared(DynamicShared() + 4 * word, value);
  return value[0];
}
uint32_t Chunk(int i) { return DynamicShared() + 16 * i; }
void CopyOwn() { CopyAsync16(Chunk(ThreadIndex()), global + 16 * ThreadIndex(), 16); }

void ExpectCaught(const std::string& claim, const std::function<void()>& kernel) {
  std::set<std::string> caught;
  simt::caught = &caught;
  simt::Launch({1, 1, 1}, kThreads, kSharedBytes, kernel);
  simt::caught = nullptr;
  std::string others;
  for (const std::string& other : caught) others += "; " + other;
  Expect(caught.count(claim) == 1, "`" + claim + "` is not found to fail" + others);
}

void CheckMistakesAreFound() {
  ExpectCaught("no race of a read with a write", [] {
    Store(ThreadIndex(), 1);
    Load((ThreadIndex() + 1) % kThreads);
  });
  ExpectCaught("no race of a write with a read", [] {
    Store(ThreadIndex(), 1);
    SyncThreads();
    Load((ThreadIndex() + 1) % kThreads);
    Store(ThreadIndex(), 2);
  });
  ExpectCaught("no race of two writes", [] { Store(ThreadIndex() / 2, 1); });
  ExpectCaught("what is read was written", [] { Load(ThreadIndex()); });
  ExpectCaught("what is read has arrived", [] {
    CopyOwn();
    CommitCopies();
    WaitForCopies<1>();  // it may be the one in flight
    Load(4 * ThreadIndex());
  });
  ExpectCaught("nothing is written where a copy is to arrive", [] {
    CopyOwn();
    Store(4 * ThreadIndex(), 1);
  });
  ExpectCaught("no race of a read with a write", [] {  // waited for, but only by the thread itself
    CopyOwn();
    CommitCopies();
    WaitForCopies<0>();
    Load(4 * ((ThreadIndex() + 1) % kThreads));
  });
  ExpectCaught("cp.async reads aligned chunks",
               [] { CopyAsync16(Chunk(ThreadIndex()), global + 16 * ThreadIndex() + 1, 8); });
  ExpectCaught("global memory is loaded aligned", [] {
    uint32_t words[4];
    LoadGlobal16(global + 8 * ThreadIndex(), words);
  });
  ExpectCaught("shared memory is accessed within its bounds", [] { Store(kSharedBytes / 4, 1); });
  ExpectCaught("shared memory is accessed aligned",
               [] { StoreShared(DynamicShared() + 4 * ThreadIndex() + 2, {1u}); });
  ExpectCaught("all threads reach every barrier and instruction of their warp", [] {
    if (ThreadIndex() != 40) SyncThreads();
  });
  ExpectCaught("all lanes of a warp are at the same instruction", [] {
    int32_t acc[4] = {};
    if (ThreadIndex() % 2) MultiplyCodes(acc, {0, 0, 0, 0}, {0, 0});
    MaxOfWarp(0);
    if (ThreadIndex() % 2 == 0) MultiplyCodes(acc, {0, 0, 0, 0}, {0, 0});
  });
  ExpectCaught("all lanes of a warp take part in each access", [] {
    if (ThreadIndex() % 2) Store(ThreadIndex(), 1);
  });
}

// The cycles that conflicts add to one store of each of two warps.
int64_t Conflicts(int bytes, const std::function<uint32_t(int)>& address) {
  const simt::BankCounts counts = simt::Launch({1, 1, 1}, 64, kSharedBytes, [&] {
    const uint32_t to = DynamicShared() + (ThreadIndex() / 32) * 2048 + address(ThreadIndex() % 32);
    if (bytes == 4) StoreShared(to, {1u});
    if (bytes == 8) StoreShared(to, {1u, 2u});
    if (bytes == 16) StoreShared(to, {1u, 2u, 3u, 4u});
  });
  Expect(counts.instructions.at(simt::Access::kStore) == 2, "a warp has one instruction");
  return counts.conflicts.at(simt::Access::kStore) / 2;
}

void CheckBanksAreCounted() {
  Expect(Conflicts(4, [](int lane) { return 4 * lane; }) == 0, "neighbouring words");
  Expect(Conflicts(4, [](int lane) { return 4 * (31 - lane); }) == 0, "in any order");
  Expect(Conflicts(4, [](int lane) { return lane % 2 * 128 + lane / 2 * 4; }) == 1,
         "two words in a bank");
  Expect(Conflicts(8, [](int lane) { return 8 * lane; }) == 0, "half a warp at a time");
  Expect(Conflicts(16, [](int lane) { return 16 * lane; }) == 0, "a quarter at a time");
  Expect(Conflicts(16, [](int lane) { return lane % 8 * 128 + lane / 8 * 16; }) == 4 * 7,
         "eight rows of 128 bytes");
}

// ldmatrix and mma multiply matrices whose fragments are put together by the PTX ISA's formulas,
// written here as they stand there: row, column of element i of a fragment.
void CheckInstructions() {
  const auto left = [](int row, int k) { return (row * 7 + k * 3) % 19 - 9; };
  const auto right = [](int k, int column) { return (column * 5 + k * 11) % 23 - 11; };
  int64_t wrong = 0;
  simt::Launch({1, 1, 1}, 32, kSharedBytes, [&] {
    const int lane = ThreadIndex(), group = lane >> 2, in_group = lane % 4;
    int32_t acc[4] = {100, 100, 100, 100};
    uint32_t a[4] = {}, b[2] = {};
    for (int i = 0; i < 16; ++i) {
      const int row = i < 4 || (i >= 8 && i < 12) ? group : group + 8;
      const int k = in_group * 4 + (i & 3) + (i < 8 ? 0 : 16);
      a[i / 4] |= static_cast<uint32_t>(left(row, k) & 0xff) << (8 * (i % 4));
    }
    for (int i = 0; i < 8; ++i) {
      const int k = in_group * 4 + (i & 3) + (i < 4 ? 0 : 16);
      b[i / 4] |= static_cast<uint32_t>(right(k, group) & 0xff) << (8 * (i % 4));
    }
    // The same fragment of a, by ldmatrix from 16 rows of 32 bytes.
    for (int byte = 0; byte < 16; byte += 4) {
      uint32_t word[1] = {};
      for (int i = 0; i < 4; ++i) {
        const int k = lane % 2 * 16 + byte + i;
        word[0] |= static_cast<uint32_t>(left(lane / 2, k) & 0xff) << (8 * i);
      }
      StoreShared(Chunk(lane) + byte, word);
    }
    SyncThreads();
    uint32_t loaded[4];
    LoadMatrices(Chunk(lane % 16 * 2 + lane / 16), loaded);
    for (int i = 0; i < 4; ++i) wrong += loaded[i] != a[i];
    MultiplyCodes(acc, a, b);
    for (int i = 0; i < 4; ++i) {
      const int row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1);
      int want = 100;
      for (int k = 0; k < 32; ++k) want += left(row, k) * right(k, column);
      wrong += acc[i] != want;
    }
    wrong += MaxOfWarp(static_cast<uint32_t>(lane * 7 % 32)) != 31;
  });
  Expect(wrong == 0, "ldmatrix, mma and redux are those of PTX");
}

}  // namespace
}  // namespace jaxfp8::cuda

int main() {
  jaxfp8::cuda::CheckMistakesAreFound();
  jaxfp8::cuda::CheckBanksAreCounted();
  jaxfp8::cuda::CheckInstructions();
  return jaxfp8::tests::Report("simt");
}
