// Operands and results of a call of attention: strides of what fits, and a reason against the rest.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernels/attention/call.h"
#include "tests/expect.h"

namespace {

using jaxfp8::Buffer;
using jaxfp8::Dims;
using jaxfp8::DType;
using jaxfp8::Status;
using jaxfp8::cuda::AttentionBuffers;
using jaxfp8::cuda::AttentionFlags;
using jaxfp8::cuda::AttentionProblem;
using jaxfp8::tests::Expect;

using Shape = std::vector<int64_t>;

struct Array {
  DType type;
  Shape shape;
};

// Nothing reads the data.
alignas(16) char data[32];

std::vector<Buffer> Buffers(const std::vector<Array>& arrays) {
  std::vector<Buffer> buffers;
  for (const Array& array : arrays) {
    buffers.push_back({array.type, Dims(array.shape.data(), array.shape.size()), data});
  }
  return buffers;
}

// Two texts of 5 tokens, 3 heads with 4 rows, 64 wide.
struct Given {
  AttentionFlags flags;
  std::vector<Array> operands{
      {DType::kBF16, {2, 3, 4, 64}}, {DType::kE4M3, {2, 5, 3, 64}}, {DType::kU8, {2, 3, 5, 64}}};
  std::vector<Array> results{{DType::kBF16, {2, 3, 4, 64}}, {DType::kU8, {100}}};

  Given() { flags.keys_by_token = true; }

  Given& Add(bool AttentionFlags::* flag, DType type, Shape shape) {
    flags.*flag = true;
    operands.push_back({type, shape});
    return *this;
  }

  Status Bind(AttentionProblem& problem, AttentionBuffers& to) const {
    problem.cache = DType::kE4M3;
    return BindAttention(flags, Buffers(operands), Buffers(results), problem, to);
  }
};

Given All() {
  Given given;
  return given.Add(&AttentionFlags::key_scale, DType::kF32, {2, 3, 1, 5})
      .Add(&AttentionFlags::value_scale, DType::kF32, {1, 3, 1, 1})
      .Add(&AttentionFlags::bias, DType::kF32, {2, 1, 4, 5})
      .Add(&AttentionFlags::lengths, DType::kS32, {2, 1, 1, 1});
}

void CheckStrides() {
  AttentionProblem p;
  AttentionBuffers b;
  const Status status = All().Bind(p, b);
  Expect(status.ok(), "all operands fit: " + status.message());
  Expect(p.texts == 2 && p.heads == 3 && p.rows == 4 && p.tokens == 5 && p.width == 64, "sizes");
  Expect(p.keys.text == 960 && p.keys.head == 64 && p.keys.token == 192, "keys by token");
  Expect(p.values.text == 960 && p.values.head == 320 && p.values.token == 64, "values by head");
  Expect(p.key_scale.text == 15 && p.key_scale.head == 5 && p.key_scale.token == 1, "key_scale");
  Expect(p.value_scale.text == 0 && p.value_scale.head == 1 && p.value_scale.token == 0,
         "value_scale");
  Expect(p.bias.text == 20 && p.bias.head == 0 && p.bias.row == 5 && p.bias.token == 1, "bias");
  Expect(p.lengths.text == 1 && p.lengths.row == 0, "lengths");
  Expect(b.bias == static_cast<void*>(data) && b.scratch_bytes == 100, "data and scratch");
}

void CheckRefusal(const Given& given, const std::string& reason) {
  AttentionProblem p;
  AttentionBuffers b;
  const std::string got = given.Bind(p, b).message();
  Expect(got.find(reason) != std::string::npos, reason + ", but: " + got);
}

void CheckRefusals() {
  Given given;
  given.operands.resize(1);
  CheckRefusal(given, "need four axes");
  given = {};
  given.operands.resize(2);
  CheckRefusal(given, "`values` is missing");
  given = {};
  given.flags.keys_by_token = false;
  CheckRefusal(given, "`keys` is");
  given = {};
  given.operands[0].type = DType::kF16;
  CheckRefusal(given, "`query` is float16");
  given = {};
  given.flags.bias = true;
  CheckRefusal(given, "`bias` is missing");
  given = All();
  given.flags.keys_by_token = false;
  CheckRefusal(given, "`keys` is float8_e4m3fn of (2, 5, 3, 64)");
  given = All();
  given.operands[1].type = DType::kS8;
  CheckRefusal(given, "`keys` is int8");
  given = {};
  CheckRefusal(given.Add(&AttentionFlags::bias, DType::kF32, {2, 3, 4, 4}),
               "`bias` has shape (2, 3, 4, 4), but needs 1 or all of each axis of (2, 3, 4, 5)");
  given = {};
  CheckRefusal(given.Add(&AttentionFlags::key_scale, DType::kF32, {2, 3, 4, 5}), "(2, 3, 1, 5)");
  given = {};
  CheckRefusal(given.Add(&AttentionFlags::lengths, DType::kF32, {2, 1, 4, 1}), "`lengths` is");
  given = All();
  given.flags.lengths = false;
  CheckRefusal(given, "but its attributes ask for 6");
  given = {};
  given.results.pop_back();
  CheckRefusal(given, "workspace");
}

// Any shapes: each is refused or fits. The sanitizers see what is read.
void CheckWild() {
  std::mt19937 random(1);
  const DType types[] = {DType::kBF16, DType::kE4M3, DType::kU8, DType::kF32, DType::kS32};
  for (int i = 0; i < 20000; ++i) {
    Given given = All();
    for (int changes = 1 + random() % 3; changes > 0; --changes) {
      std::vector<Array>& arrays = random() % 4 ? given.operands : given.results;
      if (arrays.empty()) continue;
      Array& array = arrays[random() % arrays.size()];
      switch (random() % 5) {
        case 0:
          array.type = types[random() % 5];
          break;
        case 1:
          array.shape.resize(random() % 6, 3);
          break;
        case 2:
          if (!array.shape.empty()) array.shape[random() % array.shape.size()] = random() % 6;
          break;
        case 3:
          arrays.pop_back();
          break;
        default:
          given.flags.values_by_token = random() % 2;
      }
    }
    AttentionProblem p;
    AttentionBuffers b;
    const Status status = given.Bind(p, b);
    Expect(!status.ok() || (b.query && b.keys && b.values && b.out), "what fits has data");
  }
}

}  // namespace

int main() {
  CheckStrides();
  CheckRefusals();
  CheckWild();
  return jaxfp8::tests::Report("attention_call_test");
}
