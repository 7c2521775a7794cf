// Attention of a decoding step: what the kernel refuses, and how tokens are shared among CTAs.

#include <string>

#include "cuda/kernels/attention/schedule.h"
#include "tests/expect.h"

namespace {

using jaxfp8::DType;
using jaxfp8::Status;
using jaxfp8::cuda::AttentionProblem;
using jaxfp8::cuda::AttentionWhyNot;
using jaxfp8::cuda::Device;
using jaxfp8::tests::Expect;
namespace attention = jaxfp8::cuda::attention;

Device DeviceOf(int capability) {
  Device device;
  device.compute_capability = capability, device.multiprocessors = 132;
  return device;
}

AttentionProblem ProblemOf(int64_t texts, int64_t heads, int64_t tokens) {
  AttentionProblem p;
  p.texts = texts, p.heads = heads, p.rows = 4, p.tokens = tokens, p.width = 128;
  p.cache = DType::kE4M3, p.out = DType::kBF16;
  p.keys = p.values = {tokens * heads * 128, 128, heads * 128};
  return p;
}

template <class Change>
void CheckRefusal(const char* reason, Change change, int capability = 90) {
  AttentionProblem p = ProblemOf(2, 8, 64);
  change(p);
  const Status status = AttentionWhyNot(p, DeviceOf(capability));
  Expect(status.message().find(reason) != std::string::npos,
         std::string(reason) + ", but: " + status.message());
}

void CheckRefusals() {
  Expect(AttentionWhyNot(ProblemOf(2, 8, 64), DeviceOf(80)).ok(), "the kernel takes a problem");
  CheckRefusal("compute capability 8.0", [](AttentionProblem&) {}, 75);
  CheckRefusal("48 values", [](AttentionProblem& p) { p.width = 48; });
  CheckRefusal("float8_e5m2", [](AttentionProblem& p) { p.cache = DType::kE5M2; });
  CheckRefusal("float16", [](AttentionProblem& p) { p.out = DType::kF16; });
  CheckRefusal("33 rows", [](AttentionProblem& p) { p.rows = 33; });
  CheckRefusal("no token", [](AttentionProblem& p) { p.tokens = 0; });
  CheckRefusal("16 bytes", [](AttentionProblem& p) { p.values.token = 1032; });
}

void CheckSchedule(const AttentionProblem& p, int capability, size_t scratch) {
  const attention::Schedule s = attention::ScheduleOf(p, DeviceOf(capability), scratch);
  const std::string what = std::to_string(p.texts) + " x " + std::to_string(p.tokens) + " on " +
                           std::to_string(capability) + ": ";
  const int64_t pairs = p.texts * p.heads * s.tiles;
  const size_t needed = pairs * s.parts * attention::PartFloats(p.width) * sizeof(float);
  Expect(s.tiles == (p.rows + 7) / 8, what + "tiles of 8 rows");
  Expect(s.parts == 1 || s.cluster || needed <= scratch, what + "the parts fit into scratch");
  Expect(!s.cluster || (capability >= 90 && s.parts <= attention::kMaxInCluster),
         what + "a cluster is one");
  Expect((s.parts - 1) * attention::kWarps * attention::kStep < p.tokens,
         what + "every part has tokens");
}

void CheckSchedules() {
  for (int capability : {80, 90}) {
    for (size_t scratch : {size_t{0}, size_t{1} << 20, size_t{8} << 20}) {
      for (int64_t texts : {1, 2, 16, 64, 300}) {
        for (int64_t tokens : {1, 15, 17, 1000, 2048, 32768}) {
          AttentionProblem p = ProblemOf(texts, 8, tokens);
          for (int64_t width : {64, 128, 256}) {
            for (DType cache : {DType::kE4M3, DType::kBF16}) {
              p.width = width, p.cache = cache, p.rows = 1 + tokens % 20;
              CheckSchedule(p, capability, scratch);
            }
          }
        }
      }
    }
  }
}

// The choices that were the fastest on an H200.
void CheckChoices() {
  struct Choice {
    int64_t texts, tokens, parts;
    bool cluster;
  };
  for (const Choice& c : {Choice{16, 2048, 3, true}, Choice{64, 1024, 1, false},
                          Choice{1, 1024, 8, true}, Choice{1, 32768, 64, false}}) {
    const attention::Schedule s =
        attention::ScheduleOf(ProblemOf(c.texts, 8, c.tokens), DeviceOf(90), size_t{8} << 20);
    Expect(s.parts == c.parts && s.cluster == c.cluster, std::to_string(c.texts) + " x " +
                                                             std::to_string(c.tokens) + " has " +
                                                             std::to_string(s.parts) + " parts");
  }
}

}  // namespace

int main() {
  CheckRefusals();
  CheckSchedules();
  CheckChoices();
  return jaxfp8::tests::Report("attention_schedule_test");
}
