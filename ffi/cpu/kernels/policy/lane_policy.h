// A policy defines a 32-bit lane of packed values: its contents, its packing and its
// multiplication. All loops are written once, for any policy.
//
//     policy          lane                  accumulator   instructions
//     Float32         1 float32             float32       portable, AVX2, AVX-512
//     Bf16Pairs       2 bfloat16            float32       AVX-512 BF16, AMX
//     Int16Pairs      2 16-bit integers     int32         portable, AVX2, AVX-512
//     Int8Quads       4 bytes               int32         AVX-512 VNNI, AMX

#pragma once

#include <concepts>
#include <cstdint>

#include "cpu/kernels/kernel.h"
#include "cpu/kernels/simd/vector.h"

namespace jaxfp8::JAXFP8_ISA {

template <class P>
concept LanePolicy = requires(
    typename P::Vector acc, typename P::Vector packed, typename P::Lane lane, const uint8_t* from,
    const uint8_t* const (&lines)[P::kGroup], typename P::Vector (&columns)[kVectors],
    typename P::Vector (&along)[kVectors / P::kGroup],
    typename P::Vector (&quads)[kQuad / P::kGroup], const Operand& side, const Block& block,
    const Panel& panel, void* to) {
  // K values of a lane; whether accumulators are exact, in int32.
  { P::kGroup } -> std::convertible_to<int>;
  { P::kExact } -> std::convertible_to<bool>;
  // Whether packed values are less their zero points. Otherwise sums of rows and columns correct
  // the products.
  { P::kSubtractsZeros } -> std::convertible_to<bool>;
  // The types shifted by 128, in rows and in columns, or kNone.
  { P::kShiftedRows } -> std::convertible_to<DType>;
  { P::kShiftedColumns } -> std::convertible_to<DType>;
  // The code of 0 in columns of a type.
  { P::template kZeroCode<DType::kU8> } -> std::convertible_to<int>;
  // acc + one lane of a row, broadcast, times kLanes columns; and lane by lane.
  { P::MultiplyAdd(acc, lane, packed) } -> std::same_as<typename P::Vector>;
  { P::Dot(acc, packed, packed) } -> std::same_as<typename P::Vector>;
  // kNR columns from `group` lines across K; kNR values of one column along K, packed like a row;
  // and four K values of kLanes columns, from a quad in each lane.
  P::template LoadLines<DType::kU8>(lines, columns);
  P::template LoadAlong<DType::kU8>(from, along);
  P::template LoadQuads<DType::kU8>(S32{}, quads);
  // Packs row `i` of a block, with values from `from` on.
  P::PackRow(side, block, int64_t{}, from, to, panel);
};

// The shift of a type's values for the instruction.
constexpr int ShiftOf(DType type, DType shifted) {
  if (type != shifted || type == DType::kNone) return 0;
  return type == DType::kU8 ? -128 : 128;
}

}  // namespace jaxfp8::JAXFP8_ISA
