// Rotary position embedding of queries and keys: each pair (a, b) of a head is rotated by its position's angle.
//   half-split:   a = x[i], b = x[i + h]      interleaved:  a = x[2i], b = x[2i + 1], angles of the first half
//   out_a = a · cos_a − b · sin_a             out_b = b · cos_b + a · sin_b
// The gradient is the transposed rotation. Vector cores.
//
// A core takes positions, and of each position tiles of heads. In local memory the parts of the heads are apart: a and
// b of all heads, which half-split heads are copied into and interleaved ones gathered into, and what passes unrotated.
#pragma once

#include "common.h"
#include "rotary_tiling.h"

namespace mindspeed::ascend {

template <class In, class Angle, class Out>
class Rotary {
 public:
  __aicore__ inline void Init(GM_ADDR qIn, GM_ADDR kIn, GM_ADDR cos, GM_ADDR sin, GM_ADDR qOut, GM_ADDR kOut,
                              const RotaryTiling& tiling) {
    tiling_ = tiling;
    qIn_.SetGlobalBuffer(reinterpret_cast<__gm__ In*>(qIn));
    kIn_.SetGlobalBuffer(reinterpret_cast<__gm__ In*>(kIn));
    qOut_.SetGlobalBuffer(reinterpret_cast<__gm__ Out*>(qOut));
    kOut_.SetGlobalBuffer(reinterpret_cast<__gm__ Out*>(kOut));
    cos_.SetGlobalBuffer(reinterpret_cast<__gm__ Angle*>(cos));
    sin_.SetGlobalBuffer(reinterpret_cast<__gm__ Angle*>(sin));
    const RotaryWidths widths(tiling, kMultiple);
    half_ = widths.half_dim, pairs_ = widths.pairs, rest_ = widths.rest;
    section_ = tiling.heads * half_;
    const uint32_t head = 2 * half_ + rest_;
    pipe_.InitBuffer(inQueue_, 2, tiling.heads * head * sizeof(In));
    pipe_.InitBuffer(outQueue_, 2, tiling.heads * head * sizeof(Out));
    pipe_.InitBuffer(cosQueue_, 2, 2 * half_ * sizeof(Angle));
    pipe_.InitBuffer(sinQueue_, 2, 2 * half_ * sizeof(Angle));
    pipe_.InitBuffer(angles_, 4 * half_ * sizeof(float));
    const int32_t scratch = 6 * section_ + tiling.heads * rest_;
    pipe_.InitBuffer(scratch_, scratch * sizeof(float));
    x_ = scratch_.Get<float>(), products_ = x_[2 * section_], others_ = products_[2 * section_];
    passed_ = others_[2 * section_];
    cosines_ = angles_.Get<float>(), sines_ = cosines_[2 * half_];
    Duplicate(x_, 0.0f, scratch);  // conversions of whole blocks read past the ends of heads
    if (tiling.interleaved) InitOffsets();
  }

  __aicore__ inline void Process() {
    const int64_t positions = tiling_.batch * tiling_.seq;
    for (int64_t position = GetBlockIdx(); position < positions; position += GetBlockNum()) {
      const int64_t batch = position / tiling_.seq, seq = position % tiling_.seq;
      LoadAngles(batch * tiling_.angle_batch_stride + seq * tiling_.rotary_dim);
      RotateHeads(qIn_, qOut_, tiling_.q, batch, seq);
      RotateHeads(kIn_, kOut_, tiling_.k, batch, seq);
    }
  }

 private:
  static constexpr int32_t kMultiple = 32 / (sizeof(In) < sizeof(Out) ? sizeof(In) : sizeof(Out));

  // From pairs to a and b, and back: the offsets in bytes of where each element comes from.
  __aicore__ inline void InitOffsets() {
    pipe_.InitBuffer(offsets_, (half_ + pairs_) * sizeof(uint32_t));
    split_ = offsets_.Get<uint32_t>(), merge_ = split_[half_];
    for (int32_t i = 0; i < tiling_.half_dim(); ++i) {
      split_.SetValue(i, uint32_t(2 * i * sizeof(float)));
      merge_.SetValue(2 * i, uint32_t(i * sizeof(float)));
      merge_.SetValue(2 * i + 1, uint32_t((section_ + i) * sizeof(float)));
    }
    const TEventID written = pipe_.FetchEventID(HardEvent::S_V);
    SetFlag<HardEvent::S_V>(written);
    WaitFlag<HardEvent::S_V>(written);
  }

  // cosines = [cos_a, cos_b], sines = [−sin_a, sin_b] or, transposed, [sin_b, −sin_a]: so that
  // out_a = a · cosines_a + b · sines_a and out_b = b · cosines_b + a · sines_b.
  __aicore__ inline void LoadAngles(int64_t at) {
    const int32_t half_dim = tiling_.half_dim(), parts = tiling_.interleaved ? 1 : 2;
    LocalTensor<Angle> cos = cosQueue_.template AllocTensor<Angle>(), sin = sinQueue_.template AllocTensor<Angle>();
    CopyRowsIn(cos, cos_[at], parts, half_dim, half_, half_dim);
    CopyRowsIn(sin, sin_[at], parts, half_dim, half_, half_dim);
    cosQueue_.EnQue(cos);
    sinQueue_.EnQue(sin);
    cos = cosQueue_.template DeQue<Angle>(), sin = sinQueue_.template DeQue<Angle>();
    const LocalTensor<Angle> cosB = cos[(parts - 1) * half_], sinB = sin[(parts - 1) * half_];
    const LocalTensor<float> negative = sines_[tiling_.transposed ? half_ : 0];
    Widen(cosines_, cos, half_dim);
    Widen(cosines_[half_], cosB, half_dim);
    Widen(negative, sin, half_dim);
    Widen(sines_[tiling_.transposed ? 0 : half_], sinB, half_dim);
    cosQueue_.FreeTensor(cos);
    sinQueue_.FreeTensor(sin);
    PipeBarrier<PIPE_V>();
    Muls(negative, negative, -1.0f, half_dim);
  }

  __aicore__ inline void RotateHeads(const GlobalTensor<In>& in, const GlobalTensor<Out>& out, const RotaryHeads& heads,
                                     int64_t batch, int64_t seq) {
    for (int64_t first = 0; first < heads.count; first += tiling_.heads) {
      const int32_t count = int32_t(smaller<int64_t>(tiling_.heads, heads.count - first));
      CopyIn(in[heads.in.at(batch, first, seq)], count, heads.in.head);
      Split(count);
      Rotate(count);
      Merge(count);
      CopyOut(out[heads.out.at(batch, first, seq)], count, heads.out.head);
    }
  }

  __aicore__ inline void CopyIn(const GlobalTensor<In>& heads, int32_t count, int64_t stride) {
    LocalTensor<In> x = inQueue_.template AllocTensor<In>();
    const int32_t half_dim = tiling_.half_dim(), rest = tiling_.rest();
    if (tiling_.interleaved) {
      CopyRowsIn(x, heads, count, 2 * half_dim, pairs_, stride);
    } else {
      CopyRowsIn(x, heads, count, half_dim, half_, stride);
      CopyRowsIn(x[section_], heads[half_dim], count, half_dim, half_, stride);
    }
    if (rest > 0) CopyRowsIn(x[2 * section_], heads[2 * half_dim], count, rest, rest_, stride);
    inQueue_.EnQue(x);
  }

  // Heads of `columns` elements to float32. 16-bit ones at once: their copies have filled whole blocks.
  __aicore__ inline void WidenHeads(const LocalTensor<float>& to, const LocalTensor<In>& from, int32_t count,
                                    int32_t columns, int32_t width) {
    if constexpr (sizeof(In) == 2) {
      Widen(to, from, count * width);
    } else {
      for (int32_t h = 0; h < count; ++h) Widen(to[h * width], from[h * width], columns);
    }
  }

  // x = [a, b] of all heads
  __aicore__ inline void Split(int32_t count) {
    const int32_t half_dim = tiling_.half_dim(), rest = tiling_.rest();
    LocalTensor<In> x = inQueue_.template DeQue<In>();
    PipeBarrier<PIPE_V>();  // the tile before this one still uses the scratch
    if (tiling_.interleaved) {
      WidenHeads(others_, x, count, 2 * half_dim, pairs_);
      PipeBarrier<PIPE_V>();
      for (int32_t h = 0; h < count; ++h) {
        const uint32_t head = h * pairs_ * sizeof(float);
        Gather(x_[h * half_], others_, split_, head, half_dim);
        Gather(x_[section_ + h * half_], others_, split_, uint32_t(head + sizeof(float)), half_dim);
      }
    } else {
      WidenHeads(x_, x, count, half_dim, half_);
      WidenHeads(x_[section_], x[section_], count, half_dim, half_);
    }
    if (rest > 0) WidenHeads(passed_, x[2 * section_], count, rest, rest_);
    inQueue_.FreeTensor(x);
    PipeBarrier<PIPE_V>();
  }

  // to = from · angles, of all heads: 64 columns at a time, a head per repeat.
  __aicore__ inline void TimesAngles(const LocalTensor<float>& to, const LocalTensor<float>& from,
                                     const LocalTensor<float>& angles, int32_t count) {
    const uint8_t next = uint8_t(half_ / kFloatsPerBlock);
    for (int32_t column = 0; column < tiling_.half_dim(); column += kFloatsPerRepeat) {
      const uint64_t columns = smaller<int64_t>(kFloatsPerRepeat, tiling_.half_dim() - column);
      Mul(to[column], from[column], angles[column], columns, uint8_t(count), {1, 1, 1, next, next, 0});
    }
  }

  // products = [out_a, out_b]
  __aicore__ inline void Rotate(int32_t count) {
    const LocalTensor<float> a = x_, b = x_[section_];
    TimesAngles(products_, a, cosines_, count);
    TimesAngles(products_[section_], b, cosines_[half_], count);
    TimesAngles(others_, b, sines_, count);
    TimesAngles(others_[section_], a, sines_[half_], count);
    PipeBarrier<PIPE_V>();
    Add(products_, products_, others_, section_ + count * half_);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void Merge(int32_t count) {
    LocalTensor<Out> y = outQueue_.template AllocTensor<Out>();
    if (tiling_.interleaved) {
      for (int32_t h = 0; h < count; ++h) {
        Gather(x_[h * pairs_], products_, merge_, uint32_t(h * half_ * sizeof(float)), uint32_t(tiling_.rotary_dim));
      }
      PipeBarrier<PIPE_V>();
      Narrow(y, x_, count * pairs_);
    } else {
      Narrow(y, products_, section_ + count * half_);
    }
    if (tiling_.rest() > 0) Narrow(y[2 * section_], passed_, count * rest_);
    outQueue_.EnQue(y);
  }

  __aicore__ inline void CopyOut(const GlobalTensor<Out>& heads, int32_t count, int64_t stride) {
    LocalTensor<Out> y = outQueue_.template DeQue<Out>();
    const int32_t half_dim = tiling_.half_dim(), rest = tiling_.rest();
    if (tiling_.interleaved) {
      CopyRowsOut(heads, y, count, 2 * half_dim, pairs_, stride);
    } else {
      CopyRowsOut(heads, y, count, half_dim, half_, stride);
      CopyRowsOut(heads[half_dim], y[section_], count, half_dim, half_, stride);
    }
    if (rest > 0) CopyRowsOut(heads[2 * half_dim], y[2 * section_], count, rest, rest_, stride);
    outQueue_.FreeTensor(y);
  }

  RotaryTiling tiling_;
  int32_t half_, pairs_, rest_, section_;  // widths of parts of a head; a's of all heads of a tile
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> inQueue_, cosQueue_, sinQueue_;
  TQue<TPosition::VECOUT, 1> outQueue_;
  TBuf<TPosition::VECCALC> scratch_, angles_, offsets_;
  GlobalTensor<In> qIn_, kIn_;
  GlobalTensor<Angle> cos_, sin_;
  GlobalTensor<Out> qOut_, kOut_;
  LocalTensor<float> x_, products_, others_, passed_, cosines_, sines_;
  LocalTensor<uint32_t> split_, merge_;
};

}  // namespace mindspeed::ascend
