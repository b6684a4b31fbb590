// What a block computes between its products where each session has one row: norms, rotation and attention, and the
// gate of the MLP. In float32, and of each row by itself: its bits do not depend on the rows beside it, nor on how many
// threads compute.
//
// Vectors are the compiler's own, of 8 numbers; what does not fill one is filled up with noughts.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kLanes = 8;
constexpr int kShared = 4;            // heads of a group that are computed together
constexpr int64_t kChunk = 16;        // rows of values that stay in the first cache for all of them
constexpr int64_t kAhead = 6;         // rows of keys that are asked for before their turn
constexpr int64_t kLine = 16;         // numbers of a line of the cache
constexpr int64_t kGrain = 1 << 20;   // multiplications that are worth a thread
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Whole __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Floats all(float x) { return Floats{} + x; }

inline Floats load(const float* from, int64_t left) {
  Floats x = {};
  if (left >= kLanes)
    std::memcpy(&x, from, sizeof x);
  else
    std::memcpy(&x, from, static_cast<size_t>(left) * sizeof(float));
  return x;
}

inline void store(float* to, Floats x, int64_t left) {
  if (left >= kLanes)
    std::memcpy(to, &x, sizeof x);
  else
    std::memcpy(to, &x, static_cast<size_t>(left) * sizeof(float));
}

inline float sum(Floats x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

// To one or two units in the last place (the polynomial of Cephes' expf). NaN stays NaN.
inline Floats exponential(Floats x) {
  const Floats low = all(-87.0f), high = all(88.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23 leaves no room for a fraction
  const Floats whole = shifted - 12582912.0f;
  const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Whole power = ((Whole)shifted - (0x4b400000 - 127)) << 23;
  return p * (Floats)power;
}

inline Floats sigmoid(Floats x) {
  const Floats s = 1.0f / (1.0f + exponential(-x));
  return x < all(-87.0f) ? all(0.0f) : s;  // what its argument's bound leaves there can meet a very large factor
}

// 0 is SiLU, 1 GELU in its approximation by tanh.
inline Floats activated(Floats x, int64_t act) {
  if (act == 0) return x * sigmoid(x);
  return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}

// x / √(‖x‖² + least) times the weight.
inline void normed(const float* x, int64_t columns, const float* weight, float least, float* to) {
  Floats squares = {};
  for (int64_t i = 0; i < columns; i += kLanes) {
    const Floats some = load(x + i, columns - i);
    squares += some * some;
  }
  const float scale = 1.0f / std::sqrt(sum(squares) + least);
  for (int64_t i = 0; i < columns; i += kLanes)
    store(to + i, load(x + i, columns - i) * scale * load(weight + i, columns - i), columns - i);
}

// Rotary embedding; the sines of the first half are negated.
inline void rotated(const float* x, int64_t width, const float* cos, const float* sin, float* to) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < width; ++i) to[i] = x[i] * cos[i] + x[i < half ? i + half : i - half] * sin[i];
}

inline void fetch(const float* row, int64_t width) {
  for (int64_t d = 0; d < width; d += kLine) __builtin_prefetch(row + d);
}

// Scores, softmax and sums of values of H heads over the same keys and values, whose rows are `stride` numbers apart:
// queries and out [H, width], scores [H, rows]. Rows are read once for all heads, and each head sums from the first to
// the last, so that its bits do not depend on H.
template <int H>
void attended(const float* queries, const float* keys, const float* values, int64_t rows, int64_t stride, int64_t width,
              float* scores, float* out) {
  float most[H], inverse[H];
  for (int h = 0; h < H; ++h) most[h] = -INFINITY;
  for (int64_t j = 0; j < rows; ++j) {
    const float* const key = keys + j * stride;
    if (j + kAhead < rows) fetch(key + kAhead * stride, width);
    Floats one[H] = {}, other[H] = {};
    int64_t d = 0;
    for (; d + 2 * kLanes <= width; d += 2 * kLanes) {
      const Floats a = load(key + d, kLanes), b = load(key + d + kLanes, kLanes);
      for (int h = 0; h < H; ++h) {
        one[h] += load(queries + h * width + d, kLanes) * a;
        other[h] += load(queries + h * width + d + kLanes, kLanes) * b;
      }
    }
    for (; d < width; d += kLanes)
      for (int h = 0; h < H; ++h) one[h] += load(queries + h * width + d, width - d) * load(key + d, width - d);
    for (int h = 0; h < H; ++h) {
      const float score = sum(one[h] + other[h]);
      scores[h * rows + j] = score;
      most[h] = score > most[h] ? score : most[h];
    }
  }
  for (int h = 0; h < H; ++h) {
    float* const of = scores + h * rows;
    Floats total = {};
    for (int64_t j = 0; j < rows; j += kLanes) {
      Floats some = exponential(load(of + j, rows - j) - most[h]);
      for (int64_t i = rows - j; i < kLanes; ++i) some[i] = 0.0f;
      store(of + j, some, rows - j);
      total += some;
    }
    inverse[h] = 1.0f / sum(total);
  }
  std::memset(out, 0, static_cast<size_t>(H * width) * sizeof(float));
  for (int64_t begin = 0; begin < rows; begin += kChunk) {
    const int64_t end = begin + kChunk < rows ? begin + kChunk : rows;
    for (int64_t j = end; j < end + kChunk && j < rows; ++j) fetch(values + j * stride, width);
    int64_t d = 0;
    for (; d + 2 * kLanes <= width; d += 2 * kLanes) {
      Floats a[H], b[H];
      for (int h = 0; h < H; ++h) {
        a[h] = load(out + h * width + d, kLanes);
        b[h] = load(out + h * width + d + kLanes, kLanes);
      }
      for (int64_t j = begin; j < end; ++j) {
        const float* const value = values + j * stride + d;
        const Floats v = load(value, kLanes), w = load(value + kLanes, kLanes);
        for (int h = 0; h < H; ++h) {
          a[h] += scores[h * rows + j] * v;
          b[h] += scores[h * rows + j] * w;
        }
      }
      for (int h = 0; h < H; ++h) {
        store(out + h * width + d, a[h], kLanes);
        store(out + h * width + d + kLanes, b[h], kLanes);
      }
    }
    for (; d < width; d += kLanes)
      for (int h = 0; h < H; ++h) {
        Floats a = load(out + h * width + d, width - d);
        for (int64_t j = begin; j < end; ++j) a += scores[h * rows + j] * load(values + j * stride + d, width - d);
        store(out + h * width + d, a, width - d);
      }
  }
  for (int h = 0; h < H; ++h)
    for (int64_t d = 0; d < width; ++d) out[h * width + d] *= inverse[h];
}

}  // namespace

#define SPLITLM_EXPORT extern "C" __attribute__((visibility("default")))

struct Heads {  // of a block; the same in decoder.py
  int64_t heads, kv_heads, width;
  const float *query_norm, *key_norm;  // weights [width], or null
  float query_least, key_least, scale;
};

// out [rows, columns] is each row of x, divided by √(‖row‖² + least), times the weight.
SPLITLM_EXPORT void splitlm_norm(const float* x, int64_t rows, int64_t columns, const float* weight, float least,
                                 float* out) {
  for (int64_t row = 0; row < rows; ++row) normed(x + row * columns, columns, weight, least, out + row * columns);
}

// out [rows, columns] is the activation of x; of the first half of each row, times the second, where x is gated.
SPLITLM_EXPORT void splitlm_activate(const float* x, int64_t rows, int64_t columns, int64_t act, int64_t gated,
                                     float* out) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* const from = x + row * columns * (gated ? 2 : 1);
    for (int64_t i = 0; i < columns; i += kLanes) {
      Floats some = activated(load(from + i, columns - i), act);
      if (gated) some *= load(from + columns + i, columns - i);
      store(out + row * columns + i, some, columns - i);
    }
  }
}

// One row of one session. `row` holds its query heads, key heads and value heads; keys and values [rows, kv_heads, width]
// are those that it sees, its own the last, which is written here. out is [heads, width]. Returns 0, or 1 where there
// was no memory.
SPLITLM_EXPORT int splitlm_attend(const Heads* of, const float* row, const float* cos, const float* sin, float* keys,
                                  float* values, int64_t rows, float* out, int64_t threads) {
  const int64_t heads = of->heads, width = of->width, stride = of->kv_heads * width, group = heads / of->kv_heads;
  auto* const room = static_cast<float*>(std::malloc(static_cast<size_t>(heads * (rows + width) + width) * sizeof(float)));
  if (!room) return 1;
  float *const queries = room, *const scores = room + heads * width, *const spare = scores + heads * rows;
  for (int64_t h = 0; h < heads + of->kv_heads; ++h) {
    const bool key = h >= heads;
    const float* from = row + h * width;
    float* const to = key ? keys + (rows - 1) * stride + (h - heads) * width : queries + h * width;
    const float* const weight = key ? of->key_norm : of->query_norm;
    if (weight) {
      normed(from, width, weight, key ? of->key_least : of->query_least, spare);
      from = spare;
    }
    if (cos)
      rotated(from, width, cos, sin, to);
    else
      std::memcpy(to, from, static_cast<size_t>(width) * sizeof(float));
    if (!key)
      for (int64_t d = 0; d < width; ++d) to[d] *= of->scale;
  }
  std::memcpy(values + (rows - 1) * stride, row + (heads + of->kv_heads) * width,
              static_cast<size_t>(stride) * sizeof(float));
  const int64_t parts = (group + kShared - 1) / kShared, worth = 1 + heads * rows * width / kGrain;
  const int team = static_cast<int>(threads < worth ? threads : worth);
  (void)team;  // where there are no threads
#pragma omp parallel for num_threads(team) if (team > 1) schedule(static)
  for (int64_t part = 0; part < of->kv_heads * parts; ++part) {
    const int64_t shared = part / parts, begin = part % parts * kShared, h = shared * group + begin, left = group - begin;
    const float *const q = queries + h * width, *const k = keys + shared * width, *const v = values + shared * width;
    float *const s = scores + h * rows, *const to = out + h * width;
    if (left >= 4)
      attended<4>(q, k, v, rows, stride, width, s, to);
    else if (left == 3)
      attended<3>(q, k, v, rows, stride, width, s, to);
    else if (left == 2)
      attended<2>(q, k, v, rows, stride, width, s, to);
    else
      attended<1>(q, k, v, rows, stride, width, s, to);
  }
  std::free(room);
  return 0;
}
