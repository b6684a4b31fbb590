// Products of weights in 8 bits: x [rows, columns] times weight [outputs, columns] transposed, plus bias.
//
// Weights and activations are cut along their columns into blocks of 16; a block of one row is 16 whole numbers and a
// scale. Weights are -127 to 127; activations, which cost no memory, are 128 times as fine (kFine). The products of two
// blocks are added up in 32-bit whole numbers, so exactly; the sums of blocks are scaled and added in float32, always
// from the first block to the last. So a row of x gives the same bits whatever rows are beside it and however many
// threads compute.
//
// A tile is 16 rows of weights. Of each block of a tile, its scales come first, then 4 times the 4 bytes of every row
// that meet the same 4 activations: what one vector instruction takes. Weights are stored with 128 added, since that
// instruction wants one side unsigned; what that adds to a sum is known from the activations alone, and is taken off
// where the sum begins ("start"); others take the 128 off again. Rows and columns that fill up tiles and blocks are
// zeros.
//
// Plain C functions, without torch or Python: built in seconds, and for any version of either.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && !defined(SPLITLM_PLAIN) && !defined(SPLITLM_AVX2)
#include <immintrin.h>
#define SPLITLM_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && !defined(SPLITLM_PLAIN)
#include <immintrin.h>
#ifndef SPLITLM_AVX2
#define SPLITLM_AVX2
#endif
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(SPLITLM_PLAIN)
#include <arm_neon.h>
#define SPLITLM_DOTPROD
#endif

namespace {

constexpr int kBlock = 16;                // columns that share a scale
constexpr int kTile = 16;                 // rows of weights in a tile
constexpr int kStep = 4;                  // columns that one instruction adds up
constexpr int kSteps = kBlock / kStep;
constexpr int kZero = 128;                // how a weight of nought is stored
constexpr int kWeight = 127;              // the largest weight
constexpr int kFine = 127 * 128;          // the largest activation: a high part of -127 to 127, a low one of -64 to 63
constexpr float kTiny = 1e-30f;           // a block below it is noughts: its scale could not be inverted
constexpr int64_t kGrain = 1 << 16;       // multiplications that are worth a thread
constexpr uint32_t kInfinity = 0x7f800000u;

struct Weights {  // a block of a tile
  float scale[kTile];
  uint8_t value[kSteps][kTile][kStep];
};
static_assert(sizeof(Weights) == 320, "no holes");

int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

// Rounds a block to whole numbers up to `top` (ties to even) and returns its scale: NaN where one is not finite.
float rounded(const float* from, int64_t count, int top, int16_t* to) {
  float x[kBlock] = {};
  std::memcpy(x, from, sizeof(float) * static_cast<size_t>(count));
  uint32_t bits[kBlock];
  std::memcpy(bits, x, sizeof bits);
  uint32_t most = 0;  // as whole numbers the bits of floats without their signs are in the floats' order, NaN last
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t size = bits[i] & 0x7fffffffu;
    most = size > most ? size : most;
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  if (most >= kInfinity || largest < kTiny) {
    std::memset(to, 0, sizeof(int16_t) * kBlock);
    return most >= kInfinity ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  }
  const float inverse = static_cast<float>(top) / largest;
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves no room for a fraction
  constexpr int32_t shifted = 0x4b400000;
  for (int i = 0; i < kBlock; ++i) {
    const float sum = x[i] * inverse + shift;
    int32_t whole;
    std::memcpy(&whole, &sum, sizeof whole);
    to[i] = static_cast<int16_t>(whole - shifted);
  }
  return largest / static_cast<float>(top);
}

// What differs between processors. Dot holds whole sums of kWide rows of weights, Sum the same rows' sums in float32;
// `add` adds two steps, so 8 columns, of stored weights; `fold` what a block comes to. Where 8-bit numbers are what is
// multiplied, activations are in two passes, and a sum of high parts is shifted before the low ones are added.
#if defined(SPLITLM_AVX512)

constexpr const char* kLevel = "avx512-vnni";
constexpr int kWide = 16, kRows = 4, kPasses = 2;
using Value = int8_t;
using Dot = __m512i;
using Sum = __m512;

inline Sum nothing() { return _mm512_setzero_ps(); }
inline Dot begin(int32_t start) { return _mm512_set1_epi32(start); }
inline Dot shifted(Dot dot) { return _mm512_slli_epi32(dot, 7); }

inline __m512i again(const Value* four) {
  int32_t bytes;
  std::memcpy(&bytes, four, sizeof bytes);
  return _mm512_set1_epi32(bytes);
}

inline Dot add(Dot dot, const uint8_t* one, const uint8_t* other, const Value* eight) {
  dot = _mm512_dpbusd_epi32(dot, _mm512_loadu_si512(one), again(eight));
  return _mm512_dpbusd_epi32(dot, _mm512_loadu_si512(other), again(eight + kStep));
}

inline Sum fold(Sum sum, Dot dot, const float* scales, float scale) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(_mm512_loadu_ps(scales), _mm512_set1_ps(scale)), sum);
}

inline void store(float* to, Sum sum) { _mm512_storeu_ps(to, sum); }

#elif defined(SPLITLM_AVX2)

constexpr const char* kLevel = "avx2";
constexpr int kWide = 8, kRows = 4, kPasses = 1;
using Value = int16_t;
using Sum = __m256;
struct Dot {  // of each row of weights 2 sums, of 4 rows each
  __m256i low, high;
};

inline Sum nothing() { return _mm256_setzero_ps(); }
inline Dot begin(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Dot shifted(Dot dot) { return dot; }

inline __m256i signed_weights(const uint8_t* stored) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(stored));
  return _mm256_sub_epi16(_mm256_cvtepu8_epi16(bytes), _mm256_set1_epi16(kZero));
}

inline Dot add(Dot dot, const uint8_t* one, const uint8_t* other, const Value* eight) {
  int64_t four[2];
  std::memcpy(four, eight, sizeof four);
  for (int i = 0; i < 2; ++i) {
    const uint8_t* const stored = i ? other : one;
    const __m256i x = _mm256_set1_epi64x(four[i]);
    dot.low = _mm256_add_epi32(dot.low, _mm256_madd_epi16(signed_weights(stored), x));
    dot.high = _mm256_add_epi32(dot.high, _mm256_madd_epi16(signed_weights(stored + 16), x));
  }
  return dot;
}

inline Sum fold(Sum sum, Dot dot, const float* scales, float scale) {
  const __m256i mixed = _mm256_hadd_epi32(dot.low, dot.high);  // rows 0 1 4 5 2 3 6 7
  const __m256 whole = _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(mixed, 0xd8));
  return _mm256_fmadd_ps(whole, _mm256_mul_ps(_mm256_loadu_ps(scales), _mm256_set1_ps(scale)), sum);
}

inline void store(float* to, Sum sum) { _mm256_storeu_ps(to, sum); }

#elif defined(SPLITLM_DOTPROD)

constexpr const char* kLevel = "neon-dotprod";
constexpr int kWide = 4, kRows = 8, kPasses = 2;
using Value = int8_t;
using Dot = int32x4_t;
using Sum = float32x4_t;

inline Sum nothing() { return vdupq_n_f32(0.0f); }
inline Dot begin(int32_t) { return vdupq_n_s32(0); }
inline Dot shifted(Dot dot) { return vshlq_n_s32(dot, 7); }

inline int8x16_t again(const Value* four) {
  int32_t bytes;
  std::memcpy(&bytes, four, sizeof bytes);
  return vreinterpretq_s8_s32(vdupq_n_s32(bytes));
}

inline int8x16_t signed_weights(const uint8_t* stored) {
  return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(stored), vdupq_n_u8(kZero)));
}

inline Dot add(Dot dot, const uint8_t* one, const uint8_t* other, const Value* eight) {
  dot = vdotq_s32(dot, signed_weights(one), again(eight));
  return vdotq_s32(dot, signed_weights(other), again(eight + kStep));
}

inline Sum fold(Sum sum, Dot dot, const float* scales, float scale) {
  return vfmaq_f32(sum, vcvtq_f32_s32(dot), vmulq_n_f32(vld1q_f32(scales), scale));
}

inline void store(float* to, Sum sum) { vst1q_f32(to, sum); }

#else

// Vectors of the compiler's own, which it makes of what the processor has.
constexpr const char* kLevel = "plain";
constexpr int kWide = 4, kRows = 4, kPasses = 1;
using Value = int16_t;
typedef int32_t Dot __attribute__((vector_size(64)));  // of each row of weights 4 sums
typedef float Sum __attribute__((vector_size(16)));

inline Sum nothing() { return Sum{}; }
inline Dot begin(int32_t) { return Dot{}; }
inline Dot shifted(Dot dot) { return dot; }

inline Dot products(const uint8_t* stored, const Value* four) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  typedef int16_t Shorts __attribute__((vector_size(32)));
  Bytes bytes;
  std::memcpy(&bytes, stored, sizeof bytes);
  const Value a = four[0], b = four[1], c = four[2], d = four[3];
  const Shorts x = {a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d};
  const Shorts w = __builtin_convertvector(bytes, Shorts) - static_cast<int16_t>(kZero);
  return __builtin_convertvector(w, Dot) * __builtin_convertvector(x, Dot);
}

inline Dot add(Dot dot, const uint8_t* one, const uint8_t* other, const Value* eight) {
  return dot + products(one, eight) + products(other, eight + kStep);
}

inline Sum fold(Sum sum, Dot dot, const float* scales, float scale) {
  for (int o = 0; o < kWide; ++o) {
    const int32_t whole = dot[4 * o] + dot[4 * o + 1] + dot[4 * o + 2] + dot[4 * o + 3];
    sum[o] += static_cast<float>(whole) * (scales[o] * scale);
  }
  return sum;
}

inline void store(float* to, Sum sum) { std::memcpy(to, &sum, sizeof sum); }

#endif

struct Activations {  // a block of a row
  float scale;
  int32_t start;  // what adding 128 to each weight adds, taken off; divided by 128, since it is shifted
  Value value[kPasses][kBlock];
};
static_assert(sizeof(Activations) == 40, "no holes");

void quantise(const float* x, int64_t columns, Activations* to) {
  for (int64_t from = 0; from < columns; from += kBlock, ++to) {
    int16_t whole[kBlock];
    to->scale = rounded(x + from, columns - from < kBlock ? columns - from : kBlock, kFine, whole);
    int32_t sum = 0;
    for (int i = 0; i < kBlock; ++i) {
      sum += whole[i];
      const int high = kPasses == 2 ? (whole[i] + 64) >> 7 : whole[i];
      to->value[0][i] = static_cast<Value>(high);
      if (kPasses == 2) to->value[kPasses - 1][i] = static_cast<Value>(whole[i] - high * 128);
    }
    to->start = -sum;
  }
}

// One tile of weights times R rows: R * kTile sums. What is done for a row does not depend on R.
template <int R>
void tile(const Weights* weights, const Activations* x, int64_t blocks, float* sums) {
  for (int first = 0; first < kTile; first += kWide) {
    Sum sum[R];
    for (int r = 0; r < R; ++r) sum[r] = nothing();
    for (int64_t b = 0; b < blocks; ++b) {
      const Weights& w = weights[b];
      Dot dot[R];
      for (int r = 0; r < R; ++r) dot[r] = begin(x[r * blocks + b].start);
      for (int pass = 0; pass < kPasses; ++pass) {
        for (int r = 0; r < R; ++r) dot[r] = pass ? shifted(dot[r]) : dot[r];
        for (int s = 0; s < kSteps; s += 2)
          for (int r = 0; r < R; ++r)
            dot[r] = add(dot[r], w.value[s][first], w.value[s + 1][first], x[r * blocks + b].value[pass] + s * kStep);
      }
      for (int r = 0; r < R; ++r) sum[r] = fold(sum[r], dot[r], w.scale + first, x[r * blocks + b].scale);
    }
    for (int r = 0; r < R; ++r) store(sums + r * kTile + first, sum[r]);
  }
}

struct Job {
  const Weights* weights;
  const Activations* x;
  const float* bias;  // or null
  float* out;
  int64_t rows, blocks, outputs;
};

template <int R>
void some_rows(const Job& job, int64_t t, int64_t row) {
  float sums[R * kTile];
  tile<R>(job.weights + t * job.blocks, job.x + row * job.blocks, job.blocks, sums);
  const int64_t first = t * kTile, left = job.outputs - first, count = left < kTile ? left : kTile;
  for (int r = 0; r < R; ++r) {
    float* to = job.out + (row + r) * job.outputs + first;
    for (int64_t o = 0; o < count; ++o) to[o] = sums[r * kTile + o] + (job.bias ? job.bias[first + o] : 0.0f);
  }
}

// The weights of a tile are read from memory once, and from the cache for every further group of rows.
void all_rows(const Job& job, int64_t t) {
  int64_t row = 0;
  for (; row + kRows <= job.rows; row += kRows) some_rows<kRows>(job, t, row);
  if (row + 4 <= job.rows) some_rows<4>(job, t, row), row += 4;  // where kRows is 8
  if (row + 2 <= job.rows) some_rows<2>(job, t, row), row += 2;
  if (row < job.rows) some_rows<1>(job, t, row);
}

}  // namespace

#define SPLITLM_EXPORT extern "C" __attribute__((visibility("default")))

SPLITLM_EXPORT const char* splitlm_level() { return kLevel; }

SPLITLM_EXPORT int splitlm_threaded() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

// Bytes of a packed matrix.
SPLITLM_EXPORT int64_t splitlm_bytes(int64_t outputs, int64_t columns) {
  return parts(outputs, kTile) * parts(columns, kBlock) * static_cast<int64_t>(sizeof(Weights));
}

// Packs a matrix [outputs, columns], stored row by row. A part from a multiple of 16 rows on may be packed alone.
SPLITLM_EXPORT void splitlm_pack(const float* matrix, int64_t outputs, int64_t columns, void* packed) {
  const int64_t blocks = parts(columns, kBlock);
  for (int64_t t = 0; t < parts(outputs, kTile); ++t) {
    for (int64_t b = 0; b < blocks; ++b) {
      Weights& to = static_cast<Weights*>(packed)[t * blocks + b];
      const int64_t left = columns - b * kBlock;
      for (int o = 0; o < kTile; ++o) {
        int16_t whole[kBlock] = {};
        const int64_t row = t * kTile + o;
        to.scale[o] = 0.0f;
        const float* const from = matrix + row * columns + b * kBlock;
        if (row < outputs) to.scale[o] = rounded(from, left < kBlock ? left : kBlock, kWeight, whole);
        for (int i = 0; i < kBlock; ++i) to.value[i / kStep][o][i % kStep] = static_cast<uint8_t>(whole[i] + kZero);
      }
    }
  }
}

// out [rows, outputs] from x [rows, columns], both stored row by row. Returns 0, or 1 where there was no memory.
SPLITLM_EXPORT int splitlm_product(const float* x, int64_t rows, int64_t columns, const void* packed,
                                   const float* bias, int64_t outputs, float* out, int64_t threads) {
  const int64_t blocks = parts(columns, kBlock), tiles = parts(outputs, kTile);
  const size_t bytes = static_cast<size_t>(rows * blocks) * sizeof(Activations);
  auto* const quantised = static_cast<Activations*>(std::malloc(bytes ? bytes : 1));
  if (!quantised) return 1;
  const Job job{static_cast<const Weights*>(packed), quantised, bias, out, rows, blocks, outputs};
  const int64_t worth = 1 + rows * tiles * blocks * (kTile * kBlock) / kGrain;
  const int team = static_cast<int>(threads < worth ? threads : worth);
  (void)team;  // where there are no threads
#pragma omp parallel num_threads(team) if (team > 1)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) quantise(x + row * columns, columns, quantised + row * blocks);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; ++t) all_rows(job, t);
  }
  std::free(quantised);
  return 0;
}
