// Activations of `sm80_imma`, from a stage in shared memory to A fragments of int8: one class for
// each `Dataflow`, all with the same members.
//
//   kCodes      CodeTile --ldmatrix--> registers (FP8: Requantize) --> fragment
//   kRegisters  WideTile --ld.shared.v2--> registers, Requantize --> fragment
//   kShared     WideTile --ld.shared.v4--> Requantize --st.shared.v2--> one of two CodeTiles
//               --ldmatrix--> fragment
//
// In kRegisters each warp rounds all rows. In kShared a block rounds the next stage's once, before
// it multiplies this one: `Prepare` runs one stage ahead.
//
//   a[0], a[1]  rows g and g + 8 of the fragment, K = 4t to 4t + 3
//   a[2], a[3]  rows g and g + 8 of the fragment, K = 4t + 16 to 4t + 19

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_ACTIVATIONS_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_ACTIVATIONS_CUH_

#include "cuda/kernels/sm80_imma/lines.cuh"
#include "cuda/kernels/sm80_imma/load.cuh"

namespace jaxfp8::cuda::imma {

// Loads a fragment from a tile of codes.
template <int kRows>
JAXFP8_DEVICE void LoadCodes(uint32_t tile, int fragment, int step, uint32_t (&a)[4]) {
  const int lane = ThreadIndex() % 32, row = 16 * fragment + lane % 16;
  LoadMatrices(tile + CodeTile<kRows>::At(row, 2 * step + lane / 16), a);
}

// The parameters of the rows whose sums a lane has: g and g + 8 of each fragment.
template <int kRowFragments>
struct RowsOfLane {
  Divisor params[kRowFragments][2];

  JAXFP8_DEVICE RowsOfLane(const Arguments& a, int64_t batch, int first_row) {
#pragma unroll
    for (int i = 0; i < 2 * kRowFragments; ++i) {
      const int row = first_row + 8 * i + ThreadIndex() % 32 / 4;
      params[i / 2][i % 2] = LoadLine(a.activations, batch, row, a.rows);
    }
  }
};

// What each class below has.
//   Layout          of a stage
//   kStagesAhead    how many stages before it is multiplied a stage has to have arrived
//   kPreparedBytes  of shared memory, behind the stages
template <DType kType, Dataflow kFlow, int kRowFragments>
class Activations;

template <int kRowFragments>
class Activations<DType::kS8, Dataflow::kCodes, kRowFragments> {
 public:
  using Layout = CodeTile<16 * kRowFragments>;
  static constexpr int kStagesAhead = 0, kPreparedBytes = 0;

  JAXFP8_DEVICE Activations(const Arguments&, int64_t, int) {}
  JAXFP8_DEVICE void Prepare(uint32_t, uint32_t) const {}
  JAXFP8_DEVICE void Load(uint32_t stage, uint32_t, int fragment, int step,
                          uint32_t (&a)[4]) const {
    LoadCodes<Layout::kRows>(stage, fragment, step, a);
  }
};

template <DType kType, int kRowFragments>
class Activations<kType, Dataflow::kCodes, kRowFragments> {
 public:
  static_assert(IsFloat8(kType));
  using Layout = CodeTile<16 * kRowFragments>;
  static constexpr int kStagesAhead = 0, kPreparedBytes = 0;

  JAXFP8_DEVICE Activations(const Arguments& a, int64_t batch, int first_row)
      : rows_(a, batch, first_row) {}
  JAXFP8_DEVICE void Prepare(uint32_t, uint32_t) const {}
  JAXFP8_DEVICE void Load(uint32_t stage, uint32_t, int fragment, int step,
                          uint32_t (&a)[4]) const {
    LoadCodes<Layout::kRows>(stage, fragment, step, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Requantize<kType>({a[i]}, rows_.params[fragment][i % 2]);
  }

 private:
  RowsOfLane<kRowFragments> rows_;
};

template <DType kType, int kRowFragments>
class Activations<kType, Dataflow::kRegisters, kRowFragments> {
 public:
  using Layout = WideTile<16 * kRowFragments>;
  static constexpr int kStagesAhead = 0, kPreparedBytes = 0;

  JAXFP8_DEVICE Activations(const Arguments& a, int64_t batch, int first_row)
      : rows_(a, batch, first_row) {}
  JAXFP8_DEVICE void Prepare(uint32_t, uint32_t) const {}
  JAXFP8_DEVICE void Load(uint32_t stage, uint32_t, int fragment, int step,
                          uint32_t (&a)[4]) const {
    const int lane = ThreadIndex() % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * fragment + i % 2 * 8 + lane / 4;
      const int chunk = 4 * step + i / 2 * 2 + lane % 4 / 2;
      uint32_t values[2];
      LoadShared(stage + Layout::At(row, chunk) + lane % 2 * 8, values);
      a[i] = Requantize<kType>(values, rows_.params[fragment][i % 2]);
    }
  }

 private:
  RowsOfLane<kRowFragments> rows_;
};

template <DType kType, int kRowFragments>
class Activations<kType, Dataflow::kShared, kRowFragments> {
 public:
  using Layout = WideTile<16 * kRowFragments>;
  using Prepared = CodeTile<16 * kRowFragments>;
  static constexpr int kStagesAhead = 1, kPreparedBytes = 2 * Prepared::kBytes;

  JAXFP8_DEVICE Activations(const Arguments& a, int64_t batch, int first_row) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      rows_[i] = LoadLine(a.activations, batch, first_row + RowOf(i), a.rows);
    }
  }

  // A thread takes a chunk, eight values, of every sixteenth row: those that it copied itself, so
  // it waits for no other.
  JAXFP8_DEVICE void Prepare(uint32_t stage, uint32_t prepared) const {
    const int chunk = ThreadIndex() % Layout::kChunks;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      uint32_t values[4];
      LoadShared(stage + Layout::At(RowOf(i), chunk), values);
      const uint32_t codes[2] = {Requantize<kType>({values[0], values[1]}, rows_[i]),
                                 Requantize<kType>({values[2], values[3]}, rows_[i])};
      StoreShared(prepared + Prepared::At(RowOf(i), chunk / 2) + chunk % 2 * 8, codes);
    }
  }

  JAXFP8_DEVICE void Load(uint32_t, uint32_t prepared, int fragment, int step,
                          uint32_t (&a)[4]) const {
    LoadCodes<Layout::kRows>(prepared, fragment, step, a);
  }

 private:
  static constexpr int kRowsApart = kThreads / Layout::kChunks;
  static constexpr int kPasses = Layout::kRows / kRowsApart;
  JAXFP8_DEVICE static int RowOf(int pass) {
    return ThreadIndex() / Layout::kChunks + pass * kRowsApart;
  }

  Divisor rows_[kPasses];
};

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_ACTIVATIONS_CUH_
