#include "cuda/kernels/sm90/operands.h"

#include "common/sizes.h"

namespace jaxfp8::cuda::sm90 {
namespace {

constexpr int64_t kOffsetAlignment = 256;

TmaOperand OperandOf(const Side& side, const Side& other, int64_t lines, const Problem& problem) {
  TmaOperand operand;
  operand.side = side;
  operand.lines = lines, operand.depth = problem.depth;
  operand.batches = side.batch_stride == 0 ? 1 : problem.batch;
  const int64_t size = SizeOf(side.dtype);
  const bool mixed = IsMixed(problem);
  operand.mn_major = mixed && IsEightBit(side.dtype) && side.IsMnMajor();
  const int64_t pitch = operand.mn_major ? side.depth_stride : side.free_stride;
  operand.copied = (side.IsMnMajor() && !operand.mn_major) ||
                   size * pitch % kOperandAlignment != 0 ||
                   (operand.batches > 1 && size * side.batch_stride % kOperandAlignment != 0);
  operand.summed = other.zero_point && !mixed && !side.sums;
  return operand;
}

}  // namespace

int64_t TmaOperand::LineBytes() const { return SizeOf(side.dtype) * depth; }

int64_t TmaOperand::LinePitch() const {
  if (copied) return RoundUp(LineBytes(), kOperandAlignment);
  return SizeOf(side.dtype) * (mn_major ? side.depth_stride : side.free_stride);
}

int64_t TmaOperand::BatchPitch() const {
  if (!copied && batches > 1) return SizeOf(side.dtype) * side.batch_stride;
  return (mn_major ? depth : lines) * LinePitch();
}

size_t TmaOperand::CopiedBytes() const {
  return copied ? static_cast<size_t>(batches * lines * LinePitch()) : 0;
}

size_t TmaOperand::SumsBytes() const {
  return summed ? sizeof(int32_t) * static_cast<size_t>(batches * lines) : 0;
}

TmaOperands OperandsOf(const Problem& problem) {
  TmaOperands operands;
  operands.lhs = OperandOf(problem.lhs, problem.rhs, problem.rows, problem);
  operands.rhs = OperandOf(problem.rhs, problem.lhs, problem.columns, problem);
  int64_t end = 0;
  const auto take = [&end](size_t bytes) {
    const int64_t at = RoundUp(end, kOffsetAlignment);
    if (bytes > 0) end = at + static_cast<int64_t>(bytes);
    return static_cast<size_t>(at);
  };
  for (TmaOperand* operand : {&operands.lhs, &operands.rhs}) {
    operand->at = take(operand->CopiedBytes());
    operand->sums_at = take(operand->SumsBytes());
  }
  operands.workspace = static_cast<size_t>(end);
  return operands;
}

bool IsMixed(const Problem& problem) {
  return IsEightBit(problem.lhs.dtype) != IsEightBit(problem.rhs.dtype);
}

bool HasWeightsOnRight(const Problem& problem) {
  return IsMixed(problem) && IsEightBit(problem.rhs.dtype);
}

Problem WithWeightsOnLeft(const Problem& problem) {
  return HasWeightsOnRight(problem) ? Swapped(problem) : problem;
}

}  // namespace jaxfp8::cuda::sm90
