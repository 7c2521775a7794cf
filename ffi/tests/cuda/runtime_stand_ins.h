// Stand-ins for a GPU: the parts of the CUDA runtime that plans call, the paths whose kernels need
// nvcc, and cuBLASLt. Defines these functions, so only one file of a program may include it.

#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "cuda/cublaslt/api.h"
#include "cuda/kernels/general/general.h"
#include "cuda/kernels/sm80_imma/schedule.h"
#include "cuda/kernels/sm80_w8a16/schedule.h"
#include "cuda/kernels/sm90/operands.h"
#include "cuda/kernels/sm90_gemm/path.h"
#include "cuda/kernels/sm90_gemm/schedule.h"
#include "cuda/kernels/sm90_w8a16/schedule.h"

namespace jaxfp8::cuda {
namespace {

// 0 or 1, each with plans of its own; -1 for no device.
int current_device = 0;
constexpr int kMultiprocessors[] = {132, 7};

}  // namespace

namespace w8a16 {
namespace {

// Writes every byte of the workspace that the kernels write on a device without clusters.
class PartialsPlan : public Plan {
 public:
  PartialsPlan(const Problem& problem, size_t workspace)
      : problem_(problem), workspace_(workspace) {}

  Status Run(const Buffers& buffers, cudaStream_t) const override {
    if (buffers.workspace_bytes < workspace_) return "the workspace is smaller than planned for";
    const SplitKSchedule s = MakeSchedule(
        problem_, CapacityOf(problem_, kMultiprocessors[current_device], 3, workspace_));
    const auto partials = static_cast<size_t>(s.split) * static_cast<size_t>(s.output_tiles);
    if (s.split > 1) std::memset(buffers.workspace, 2, partials * PartialTileBytes(problem_));
    return {};
  }

 private:
  Problem problem_;
  size_t workspace_;
};

Status MakePartialsPlan(const Problem& problem, const Device&, size_t workspace,
                        std::unique_ptr<Plan>& plan) {
  plan = std::make_unique<PartialsPlan>(WithWeightsOnRight(problem), workspace);
  return {};
}

}  // namespace
}  // namespace w8a16

const Path kSm80W8A16 = {"sm80_w8a16", w8a16::WhyNotEither, w8a16::MakePartialsPlan, true, true};

namespace imma {
namespace {

// Writes the codes and scales of activations.
class CodesPlan : public Plan {
 public:
  CodesPlan(const Problem& problem, size_t workspace) : problem_(problem), workspace_(workspace) {}

  Status Run(const Buffers& buffers, cudaStream_t) const override {
    if (buffers.workspace_bytes < workspace_) return "the workspace is smaller than planned for";
    if (problem_.batch * problem_.rows * problem_.columns == 0) return {};
    std::memset(buffers.workspace, 1, ScratchOf(problem_).bytes);
    return {};
  }

 private:
  Problem problem_;
  size_t workspace_;
};

Status MakeCodesPlan(const Problem& problem, const Device&, size_t workspace,
                     std::unique_ptr<Plan>& plan) {
  const Problem oriented = WithWeightsOnRight(problem);
  const bool empty = problem.batch * problem.rows * problem.columns == 0;
  if (!empty && workspace < ScratchOf(oriented).bytes) return "the workspace is too small";
  plan = std::make_unique<CodesPlan>(oriented, workspace);
  return {};
}

}  // namespace
}  // namespace imma

const Path kSm80Imma = {"sm80_imma", imma::WhyNot, imma::MakeCodesPlan};

namespace sm90 {
namespace {

// Writes the copies of the operands and the sums of shared units, and asks for the tile of every
// block and unit.
class CopiesPlan : public Plan {
 public:
  //   problem  with 8-bit weights on the left of 16-bit values
  CopiesPlan(const Problem& problem, int32_t multiprocessors, size_t workspace)
      : operands_(OperandsOf(problem)) {
    if (IsMixed(problem)) {
      ShareMixed(problem, multiprocessors, workspace);
    } else {
      schedule_ = MakeSchedule(problem, Choose(problem, multiprocessors));
    }
    ctas_ = CtasOf(schedule_, multiprocessors);
  }

  void ShareMixed(const Problem& problem, int32_t multiprocessors, size_t workspace) {
    const Configuration configuration = ChooseMixed(problem, multiprocessors);
    schedule_ = MakeMixedSchedule(problem, configuration);
    TileSchedule shared = schedule_;
    ShareUnits(problem, configuration, multiprocessors, shared);
    const size_t bytes = SharedUnitsBytes(shared, configuration.tile, multiprocessors);
    if (bytes > 0 && bytes <= workspace) schedule_ = shared, shared_bytes_ = bytes;
  }

  Status Run(const Buffers& buffers, cudaStream_t) const override {
    JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(buffers.workspace_bytes, operands_.workspace));
    for (const TmaOperand& operand : {operands_.lhs, operands_.rhs}) {
      auto* workspace = static_cast<uint8_t*>(buffers.workspace);
      std::memset(workspace + operand.at, 1, operand.CopiedBytes());
      std::memset(workspace + operand.sums_at, 1, operand.SumsBytes());
    }
    if (shared_bytes_ > 0) {
      if (buffers.workspace_bytes < shared_bytes_)
        return "a smaller workspace than was planned for";
      std::memset(buffers.workspace, 1, shared_bytes_);
    }
    for (int32_t block = 0; block < std::min(ctas_, 10); ++block) {
      Parts<true> parts(schedule_, block, ctas_);
      Part part;
      for (int count = 0; count < 100 && parts.Next(schedule_, part); ++count) {
        TileOf(schedule_, part.unit, 1);
      }
    }
    return {};
  }

  Status WhyNot(size_t workspace) const { return WhyNotWorkspace(workspace, operands_.workspace); }

 private:
  TmaOperands operands_;
  TileSchedule schedule_;
  int32_t ctas_ = 1;
  size_t shared_bytes_ = 0;
};

Status MakeCopiesPlan(const Problem& problem, const Device& device, size_t workspace,
                      std::unique_ptr<Plan>& plan) {
  auto made = std::make_unique<CopiesPlan>(WithWeightsOnLeft(problem),
                                           std::max(1, device.multiprocessors), workspace);
  JAXFP8_RETURN_IF_ERROR(made->WhyNot(workspace));
  plan = std::move(made);
  return {};
}

}  // namespace
}  // namespace sm90

const Path kSm90Gemm = {"sm90_gemm", sm90::WhyNot, sm90::MakeCopiesPlan, true};

namespace {

class EmptyPlan : public Plan {
 public:
  Status Run(const Buffers&, cudaStream_t) const override { return {}; }
};

}  // namespace

Status PlanGeneral(const Problem&, const Device&, size_t, std::unique_ptr<Plan>& plan) {
  plan = std::make_unique<EmptyPlan>();
  return {};
}

Status OpenCublasLt(const CublasLt*& library) {
  static const CublasLt stand_in = [] {
    CublasLt made{};
    made.version = 130100;
    return made;
  }();
  library = &stand_in;
  return {};
}

}  // namespace jaxfp8::cuda

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  if (jaxfp8::cuda::current_device < 0) return cudaErrorNoDevice;
  *device = jaxfp8::cuda::current_device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = device == 0 ? 9 : 8;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = jaxfp8::cuda::kMultiprocessors[device];
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 163 << 10;
      return cudaSuccess;
    default:
      *value = 0;
      return cudaSuccess;
  }
}

const char* cudaGetErrorName(cudaError_t status) {
  return status == cudaErrorNoDevice ? "cudaErrorNoDevice" : "an error";
}
const char* cudaGetErrorString(cudaError_t) { return "as the stand-in has it"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

}  // extern "C"
