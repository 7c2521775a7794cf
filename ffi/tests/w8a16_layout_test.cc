// The index maps of `sm80_w8a16`: tiles in shared memory are complete and do not overlap, loads
// have no bank conflicts, and both weight layouts give the same fragments.

#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/sm80_w8a16/fragments.h"
#include "tests/expect.h"

namespace jaxfp8::cuda::w8a16 {
namespace {

using tests::Expect;

template <typename Offset>
void CheckTile(const char* name, int stored_rows, int chunks, Offset offset) {
  std::set<int> seen;
  for (int line = 0; line < stored_rows; ++line) {
    for (int chunk = 0; chunk < chunks; ++chunk) seen.insert(offset(line, chunk));
  }
  const int count = stored_rows * chunks;
  Expect(static_cast<int>(seen.size()) == count, std::string(name) + ": chunks overlap");
  Expect(*seen.begin() == 0 && *seen.rbegin() == 16 * (count - 1), std::string(name) + ": gaps");
}

// `lanes` lanes, each reading `words` words from its offset, together touch each bank once.
template <typename Offset>
void CheckBanks(const char* name, int first, int lanes, int words, Offset offset) {
  std::set<int> banks;
  for (int lane = first; lane < first + lanes; ++lane) {
    for (int word = 0; word < words; ++word) banks.insert((offset(lane) / 4 + word) % 32);
  }
  Expect(static_cast<int>(banks.size()) == lanes * words, std::string(name) + ": bank conflict");
}

template <Order kOrder>
void CheckWeightBanks(int warp, int step, int i) {
  constexpr bool kWgmma = kOrder == Order::kWgmma;
  constexpr int kLanes = kOrder == Order::kRuns ? 8 : 16;
  for (int first = 0; first < 32 && !kWgmma; first += kLanes) {
    CheckBanks("[N, K]", first, kLanes, 32 / kLanes, [&](int lane) {
      const int depth = DepthOf<kOrder>(lane, step / (32 / kLanes) * (32 / kLanes), 0);
      return KContiguousOffset<kOrder>(ColumnOf(warp, lane) + i, depth / 16) + depth % 16;
    });
  }
  for (int t = 0; t < 4 && kWgmma; ++t) {  // lanes 2u and 2u + 1 share a word
    CheckBanks("[N, K], wgmma", 0, 8, 4, [&](int g) {
      return KContiguousOffset<kOrder>(ColumnOf(warp, 4 * g + t) + i, step);
    });
  }
  CheckBanks("[K, N]", 0, 32, 1, [&](int lane) {
    const int column = ColumnOf(warp, lane);
    return MnMajorOffset<kOrder>(DepthOf<kOrder>(lane, step, i), column / 16) + column % 16;
  });
}

template <Order kOrder>
void CheckActivationBanks(int step) {
  for (int first = 0; first < 32; first += 8) {
    CheckBanks("activations", first, 8, 4, [&](int lane) {
      const int chunk = DepthOf<kOrder>(lane, step / 2 * 2, 0) / 8;
      return ActivationOffset<kOrder>(ActivationRowOf(lane, 0), chunk);
    });
  }
}

void CheckAllBanks() {
  for (int warp = 0; warp < kWarps; ++warp) {
    for (int step = 0; step < 8; ++step) {
      for (int i = 0; i < 4; ++i) {
        CheckWeightBanks<Order::kRuns>(warp, step, i);
        CheckWeightBanks<Order::kBlocks>(warp, step, i);
        CheckWeightBanks<Order::kWgmma>(warp, step, i);
      }
      CheckActivationBanks<Order::kRuns>(step);
      CheckActivationBanks<Order::kBlocks>(step);
    }
  }
  for (int first = 0; first < 32; first += 8) {
    CheckBanks("sums", first, 8, 4,
               [&](int lane) { return 4 * (RowOf(lane, 0) * kSumPitch + ColumnOf(0, lane)); });
  }
}

// The steps of a warp cover every depth of the tile once, and its lanes every column and row once.
template <Order kOrder>
void CheckCoverage() {
  std::multiset<std::pair<int, int>> weights;
  std::multiset<std::pair<int, int>> acc;
  for (int warp = 0; warp < kWarps; ++warp) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int column = 0; column < 4; ++column) {
        for (int i = 0; i < 32; ++i) {
          weights.insert({ColumnOf(warp, lane) + column, DepthOf<kOrder>(lane, i / 4, i % 4)});
        }
        for (int i = 0; i < 16; ++i) {
          acc.insert({ColumnOf(warp, lane) + column, RowOf(lane, i / 2) + i % 2});
        }
      }
    }
  }
  for (int column = 0; column < kTileColumns; ++column) {
    for (int depth = 0; depth < kTileDepth; ++depth) {
      Expect(weights.count({column, depth}) == 1, "each weight is multiplied once");
    }
    for (int row = 0; row < 64; ++row) {
      Expect(acc.count({column, row}) == 1, "each sum belongs to one lane");
    }
  }
}

// `PickBytes` with the kernel's selectors puts the right codes, sign-extended, into a word.
void CheckPicks() {
  // [N, K]: byte d of the word is depth d.
  Expect(PickBytes(0x83020180u, 0, PickDepths(0)) == 0x0001ff80u, "[N, K]: depths 0 and 1");
  Expect(PickBytes(0x83020180u, 0, PickDepths(1)) == 0xff830002u, "[N, K]: depths 2 and 3");
  // [K, N]: byte c of word d is column c of depth d, written dc.
  for (uint32_t c = 0; c < 4; ++c) {
    Expect(PickBytes(0x03020100u, 0x93929190u, PickColumn(c)) == (0xff900000u | c << 16 | c),
           "[K, N]: depths 0 and 1 of a column");
  }
}

// The instruction of mma.cuh for one warp, computed on the host from the fragments of all lanes.
struct Warp {
  uint32_t a[32][2][4], b[32][2];
  float acc[32][2][4] = {};

  template <DType kWide>
  void Multiply() {
    for (int lane = 0; lane < 32; ++lane) {
      for (int m = 0; m < 2; ++m) {
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4, column = lane % 4 * 2 + i % 2;  // of the 16 x 8 accumulators
          for (int t = 0; t < 4; ++t) {
            for (int p = 0; p < 2; ++p) {
              const uint32_t left = a[row * 4 + t][m][2 * p + i / 2], right = b[column * 4 + t][p];
              for (int half = 0; half < 2; ++half) {
                acc[lane][m][i] += WideLane<kWide>(left, half) * WideLane<kWide>(right, half);
              }
            }
          }
        }
      }
    }
  }
};

uint8_t CodeAt(int column, int depth) {
  return static_cast<uint8_t>(column * 7 + depth * 13 + depth / 9);
}
int ActivationAt(int row, int depth) { return (row * 5 + depth * 3) % 17 - 8; }

// Where activation chunks of an 8-row tile lie.
template <Order kOrder>
int OffsetOf(int row, int chunk) {
  return kOrder == Order::kWgmma ? WgmmaActivationOffset(8, row, chunk)
                                 : ActivationOffset<kOrder>(row, chunk);
}

// The activations that a lane multiplies in a step: two pairs of depths of one row.
template <DType kActivation, Order kOrder>
void LoadActivations(const uint8_t* activations, int lane, int step, uint32_t (&to)[2]) {
  constexpr bool kWgmma = kOrder == Order::kWgmma;
  Vector16 rows = {};
  if constexpr (!kWgmma) rows = LoadTwoSteps<kActivation, kOrder>(activations, lane, 0, step / 2);
  for (int p = 0; p < 2; ++p) {
    // Where wgmma reads: the descriptor's address, and bits 4 to 6 XORed with bits 7 to 9.
    int at = step / 4 * 1024 + step % 4 * 32 + lane / 4 * 128 + p * 16 + lane % 4 * 4;
    at ^= (at >> 7 & 7) << 4;
    to[p] = kWgmma ? *reinterpret_cast<const uint32_t*>(activations + at)
                   : rows.words[2 * (step % 2) + p];
  }
}

// Multiplies a tile of integers, whose sums are exact, through shared memory as the kernel does.
template <DType kActivation, bool kMnMajor, Order kOrder>
void CheckTileProduct() {
  constexpr DType kWide = WideOf(kActivation);
  constexpr int kSize = SizeOf(kActivation);
  using D = Decoder<DType::kS8, kWide>;
  alignas(16) static uint8_t weights[kWeightBytes], activations[8 * 256];
  for (int depth = 0; depth < kTileDepth; ++depth) {
    for (int column = 0; column < kTileColumns; ++column) {
      const int offset = kMnMajor ? MnMajorOffset<kOrder>(depth, column / 16) + column % 16
                                  : KContiguousOffset<kOrder>(column, depth / 16) + depth % 16;
      weights[offset] = CodeAt(column, depth);
    }
    for (int row = 0; row < 8; ++row) {
      const auto value = static_cast<float>(ActivationAt(row, depth));
      const Bits<kActivation> bits = Encode<kActivation>(value);
      auto* at = activations + OffsetOf<kOrder>(row, depth / 8) + depth % 8 * kSize;
      for (int i = 0; i < kSize; ++i) at[i] = static_cast<uint8_t>(bits >> (8 * i));
    }
  }
  for (int w = 0; w < kWarps; ++w) {
    Warp warp;
    for (int step = 0; step < 8; ++step) {
      for (int lane = 0; lane < 32; ++lane) {
        ColumnFactors params = {};
        for (int j = 0; j < 4; ++j) {
          params.zero_addend[j] =
              D::ZeroPointAddend(DType::kS8, ColumnOf(w, lane) + j - 64);  // zero points
        }
        const Codes codes = LoadCodes<kMnMajor, kOrder>(weights, 32 * w + lane, step / 4);
        DecodeStep<D, kMnMajor, true>(codes.values[step % 4], params, D::SignFlip(DType::kS8),
                                      warp.a[lane]);
        LoadActivations<kActivation, kOrder>(activations, lane, step, warp.b[lane]);
      }
      warp.Multiply<kWide>();
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 8; ++i) {
        // A lane's accumulators, as the kernel stores them: two rows of four columns.
        const int row = RowOf(lane, 0) + i % 2, j = i / 2, column = ColumnOf(w, lane) + j;
        int want = 0;
        for (int depth = 0; depth < kTileDepth; ++depth) {
          const int weight = static_cast<int8_t>(CodeAt(column, depth)) - (column - 64);
          want += weight * ActivationAt(row, depth);
        }
        Expect(warp.acc[lane][j / 2][j % 2 * 2 + i % 2] == static_cast<float>(want),
               kMnMajor ? "a [K, N] tile is multiplied" : "an [N, K] tile is multiplied");
      }
    }
  }
}

// A NaN code makes the fragment rows of its column NaN, and no others.
template <bool kMnMajor>
void CheckNaN() {
  using D = Decoder<DType::kE4M3, DType::kBF16>;
  for (int step = 0; step < 4; ++step) {
    for (int word = 0; word < 4; ++word) {
      for (int byte = 0; byte < 4; ++byte) {
        Codes codes = {};
        codes.values[step][word] = 0x7fu << (8 * byte);
        uint32_t fragments[2][4];
        NaNFragments<D, kMnMajor>(codes, fragments);
        const int column = kMnMajor ? byte : word;
        for (int i = 0; i < 8; ++i) {
          const bool poisoned = i / 4 == column / 2 && i % 4 == column % 2;
          Expect(fragments[i / 4][i % 4] == (poisoned ? 0x7fff7fffu : 0), "NaN spoils its column");
        }
      }
    }
  }
}

template <Order kOrder>
void CheckMaps() {
  CheckTile("[N, K]", kWeightRows, kWeightChunks, KContiguousOffset<kOrder>);
  CheckTile("[K, N]", kWeightRows, kWeightChunks, MnMajorOffset<kOrder>);
  CheckCoverage<kOrder>();
  CheckTileProduct<DType::kBF16, false, kOrder>();
  CheckTileProduct<DType::kBF16, true, kOrder>();
  CheckTileProduct<DType::kF16, false, kOrder>();
  CheckTileProduct<DType::kF16, true, kOrder>();
  if constexpr (kOrder != Order::kWgmma) {
    CheckTile("activations", 64, kActivationChunks, ActivationOffset<kOrder>);
    CheckTileProduct<DType::kE4M3, false, kOrder>();
    CheckTileProduct<DType::kE4M3, true, kOrder>();
  }
}

}  // namespace
}  // namespace jaxfp8::cuda::w8a16

int main() {
  using namespace jaxfp8::cuda::w8a16;
  CheckTile("activations, wgmma", 64, kActivationChunks,
            [](int row, int chunk) { return WgmmaActivationOffset(64, row, chunk); });
  CheckMaps<Order::kRuns>();
  CheckMaps<Order::kBlocks>();
  CheckMaps<Order::kWgmma>();
  CheckAllBanks();
  CheckPicks();
  CheckNaN<false>();
  CheckNaN<true>();
  return jaxfp8::tests::Report("w8a16 layout");
}
