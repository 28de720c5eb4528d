#include "fused_experts.h"

#include "common/group_matrix.h"
#include "common/vec_math.h"

namespace mindspeed::cpu::MINDSPEED_ISA {
namespace {

constexpr int64_t kColumns = 1056;  // of gate and of up that are worked on at a time

// gate and up [columns] from a row of z that begins at those columns.
template <class T>
void load_gate_up(const T* z, const GatedActivation& activation, int64_t columns, float* gate, float* up) {
  if (activation.interleaved) {
    float both[2 * kColumns];
    for_each_vector(2 * columns, [&](int64_t i, auto lanes) { store(both + i, load(z + i, lanes), lanes); });
    for (int64_t i = 0; i < columns; ++i) gate[i] = both[2 * i], up[i] = both[2 * i + 1];
  } else {
    for_each_vector(columns, [&](int64_t i, auto lanes) {
      store(gate + i, load(z + i, lanes), lanes);
      store(up + i, load(z + activation.size + i, lanes), lanes);
    });
  }
}

template <class T>
void store_gate_up(const float* gate, const float* up, const GatedActivation& activation, int64_t columns, T* z) {
  if (activation.interleaved) {
    float both[2 * kColumns];
    for (int64_t i = 0; i < columns; ++i) both[2 * i] = gate[i], both[2 * i + 1] = up[i];
    for_each_vector(2 * columns, [&](int64_t i, auto lanes) { store(z + i, load(both + i, lanes), lanes); });
  } else {
    for_each_vector(columns, [&](int64_t i, auto lanes) {
      store(z + i, load(gate + i, lanes), lanes);
      store(z + activation.size + i, load(up + i, lanes), lanes);
    });
  }
}

// Where the columns of gate and up from `column` on begin in a row of z.
int64_t start_of(const GatedActivation& activation, int64_t column) {
  return activation.interleaved ? 2 * column : column;
}

// The activation and what its derivatives need.
struct Activated {
  Vec gate, up, sigma, glu;  // after clamping; gate · sigma

  Activated(const GatedActivation& activation, Vec raw_gate, Vec raw_up)
      : gate(min(broadcast(activation.limit), raw_gate)),
        up(max(broadcast(-activation.limit), min(broadcast(activation.limit), raw_up)) + activation.up_offset),
        sigma(sigmoid(gate * activation.alpha)),
        glu(gate * sigma) {}

  Vec value() const { return glu * up; }
};

// z and h of one row from the sums of products.
template <class T>
void finish_row(const ExpertsForward& args, const GroupBlock& block, int64_t r, const float* sums) {
  const GatedActivation& activation = args.activation;
  const int64_t start = start_of(activation, block.column);
  const float* bias = args.bias == nullptr ? nullptr : args.bias + block.group * 2 * activation.size + start;
  T* z = row<T>(args.z, r) + start;
  // Gate and up one after the other are two runs of columns, in turn they are one.
  const int64_t runs = activation.interleaved ? 1 : 2, length = 2 * block.columns / runs;
  for (int64_t run = 0; run < runs; ++run)
    for_each_vector(length, [&](int64_t i, auto lanes) {
      Vec sum = load(sums + run * length + i, lanes);
      if (bias != nullptr) sum += load(bias + run * activation.size + i, lanes);
      store(z + run * activation.size + i, sum, lanes);
    });

  float gate[kColumns], up[kColumns];
  load_gate_up(z, activation, block.columns, gate, up);
  T* h = row<T>(args.h, r) + block.column;
  for_each_vector(block.columns, [&](int64_t i, auto lanes) {
    store(h + i, Activated(activation, load(gate + i, lanes), load(up + i, lanes)).value() * args.weight[r], lanes);
  });
}

// The columns from `column` on of one row: h and the gradients of z, from the gradient of h before its rounding. With
// s = σ(alpha · gate): d gate s / d gate = s + alpha · gate · s · (1 − s). Returns this part of the weight's gradient.
template <class T>
float differentiate_row(const ExpertsBackward& args, int64_t r, int64_t column, int64_t columns, const float* grad_h) {
  const GatedActivation& activation = args.activation;
  const int64_t start = start_of(activation, column);
  float gate[kColumns], up[kColumns];
  load_gate_up(row<T>(args.z, r) + start, activation, columns, gate, up);
  T* h = row<T>(args.h, r) + column;
  const float weight = args.weight[r], limit = activation.limit;
  const float grad_weight = sum_over(columns, [&](int64_t i, auto lanes) {
    const Vec raw_gate = load(gate + i, lanes), raw_up = load(up + i, lanes), gradient = load(grad_h + i, lanes);
    const Activated a(activation, raw_gate, raw_up);
    store(h + i, a.value() * weight, lanes);
    const Vec grad_value = gradient * weight;
    const Vec slope = a.sigma + a.glu * activation.alpha * (1.0f - a.sigma);
    store(gate + i, raw_gate <= limit ? grad_value * a.up * slope : Vec{}, lanes);
    store(up + i, raw_up <= limit && raw_up >= -limit ? grad_value * a.glu : Vec{}, lanes);
    return gradient * a.value();
  });
  store_gate_up(gate, up, activation, columns, row<T>(args.grad_z, r) + start);
  return grad_weight;
}

}  // namespace

void fused_experts_forward_kernel(const ExpertsForward& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    const GemmBuffers buffers;
    for (int64_t b = begin; b < end; ++b) {
      GroupBlock block = args.blocks[b];
      const int64_t last = block.column + block.columns;
      const FloatBuffer sums(block.rows * 2 * kColumns);
      const Matrix<T> x = matrix_of<T>(args.x, args.token, block.row);
      const Matrix<T> gate_up = matrix_of<T>(args.gate_up, block.group);
      for (; block.column < last; block.column += kColumns) {
        block.columns = std::min(kColumns, last - block.column);
        const int64_t width = 2 * block.columns, size = args.activation.size;
        const auto multiply = [&](int64_t column, int64_t columns, float* to) {
          gemm(block.rows, columns, args.hidden, x, gate_up.from(0, column), to, width, false, buffers);
        };
        if (args.activation.interleaved) {
          multiply(2 * block.column, width, sums.data());
        } else {
          multiply(block.column, block.columns, sums.data());
          multiply(size + block.column, block.columns, sums.data() + block.columns);
        }
        for (int64_t r = 0; r < block.rows; ++r) finish_row<T>(args, block, block.row + r, sums.data() + r * width);
      }
    }
  });
}

void fused_experts_backward_kernel(const ExpertsBackward& args, int64_t begin, int64_t end) {
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    const GemmBuffers buffers;
    for (int64_t b = begin; b < end; ++b) {
      const GroupBlock& block = args.blocks[b];
      const FloatBuffer grad_h(block.rows * kColumns);
      const Matrix<T> grad = matrix_of<T>(args.grad, args.token, block.row);
      const Matrix<T> down = matrix_of<T>(args.down, block.group);
      for (int64_t r = block.row; r < block.row + block.rows; ++r) {
        const T* gradient = row<T>(args.grad, args.token[r]);
        const float* bias = args.down_bias == nullptr ? nullptr : args.down_bias + block.group * args.hidden;
        args.grad_weight[r] = bias == nullptr ? 0.0f : sum_over(args.hidden, [&](int64_t i, auto lanes) {
          return load(gradient + i, lanes) * load(bias + i, lanes);
        });
      }
      for (int64_t column = 0; column < args.activation.size; column += kColumns) {
        const int64_t columns = std::min(kColumns, args.activation.size - column);
        gemm(block.rows, columns, args.hidden, grad, down.from(0, column), grad_h.data(), columns, false, buffers);
        for (int64_t r = 0; r < block.rows; ++r)
          args.grad_weight[block.row + r] +=
              differentiate_row<T>(args, block.row + r, column, columns, grad_h.data() + r * columns);
      }
    }
  });
}

void fused_experts_bias_gradient_kernel(const ExpertsBiasGradient& args, int64_t begin, int64_t end) {
  if (args.size == 0) return;  // an empty tensor has no memory, and memset takes no null pointer
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t e = begin; e < end; ++e) {
      float* sums = args.sums + e * args.size;
      __builtin_memset(sums, 0, args.size * sizeof(float));
      for (int64_t r = args.bounds[e]; r < args.bounds[e + 1]; ++r) {
        const T* x = row<T>(args.x, args.index == nullptr ? r : args.index[r]);
        const float weight = args.weight == nullptr ? 1.0f : args.weight[r];
        for_each_vector(args.size, [&](int64_t i, auto lanes) {
          store(sums + i, load(sums + i, lanes) + load(x + i, lanes) * weight, lanes);
        });
      }
    }
  });
}

}  // namespace mindspeed::cpu::MINDSPEED_ISA
