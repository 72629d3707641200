// y[m][o] = scale[o] * sum_k x[m][k] * w[o][k] + bias[o], for few rows x and weights that stream from memory once.
//
// Each sum has 16 partial sums, one for every k modulo 16, that are added up in a fixed order at the end. So a row's
// bits depend neither on how many rows there are, nor on how they are cut into tiles, nor on the instruction set.
// Weights are fp32, fp16, bf16 or int8 (with a scale for each output), in rows of K; x, bias and y are fp32.
//
// Compiled once for each instruction set, see setup.py. Plain C at the border: it is loaded without torch.

#include <immintrin.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr size_t LANES = 16;
// Weights are fetched into the second cache so many tiles ahead of their use.
constexpr size_t TILES_AHEAD = 2;
constexpr size_t LINE_BYTES = 64;
// Rows that are computed at once; with more of them, so many outputs meet all before the next ones do.
constexpr size_t MOST_ROWS = 6;
constexpr size_t OUTPUTS_AT_ONCE = 8;

struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};

#if defined(__AVX512F__)

struct Lanes {
    __m512 all;
};
inline Lanes zero() { return {_mm512_setzero_ps()}; }
inline Lanes load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Lanes load(const Half* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline Lanes load(const Brain* from) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
}
inline Lanes load(const int8_t* from) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))};
}
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return {_mm512_fmadd_ps(a.all, b.all, sum.all)}; }
inline __m256 folded(Lanes sum) {
    return _mm256_add_ps(_mm512_castps512_ps256(sum.all), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sum.all), 1)));
}
// Outputs that are computed at once for a number of rows: as many as there are registers for their sums.
constexpr size_t outputs_for(size_t rows) { return rows <= 2 ? 8 : rows == 3 ? 6 : 4; }

#else

struct Lanes {
    __m256 low, high;
};
inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Lanes load(const Half* from) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline __m256 widened(const Brain* from) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
inline Lanes load(const Brain* from) { return {widened(from), widened(from + 8)}; }
inline __m256 widened(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Lanes load(const int8_t* from) { return {widened(from), widened(from + 8)}; }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) {
    return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
inline __m256 folded(Lanes sum) { return _mm256_add_ps(sum.low, sum.high); }
constexpr size_t outputs_for(size_t rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }

#endif

// The last lanes of a row whose length is no multiple of them; zeros add nothing.
template <class T>
Lanes load_some(const T* from, size_t count) {
    T padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

inline float total(Lanes sum) {
    const __m256 eight = folded(sum);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

template <class W>
struct Product {
    const float* x;
    size_t x_stride;
    const W* w;
    size_t w_stride;
    const float* scale;
    const float* bias;
    float* y;
    size_t y_stride;
    size_t num_rows, num_outputs, length;
};

// R rows by O outputs from row `m` and output `o` on. FETCH: the weights of tiles behind it are wanted soon.
template <size_t R, size_t O, bool FETCH, class W>
inline void tile(const Product<W>& p, size_t m, size_t o) {
    const float* x = p.x + m * p.x_stride;
    const W* w = p.w + o * p.w_stride;
    const W* ahead = w + TILES_AHEAD * O * p.w_stride;
    Lanes sums[R][O];
    for (size_t i = 0; i < R; i++)
        for (size_t j = 0; j < O; j++) sums[i][j] = zero();
    const size_t whole = p.length / LANES * LANES;
    for (size_t k = 0; k < whole; k += LANES) {
        Lanes weights[O];
        for (size_t j = 0; j < O; j++) {
            if (FETCH && k * sizeof(W) % LINE_BYTES == 0)
                _mm_prefetch(reinterpret_cast<const char*>(ahead + j * p.w_stride + k), _MM_HINT_T1);
            weights[j] = load(w + j * p.w_stride + k);
        }
        for (size_t i = 0; i < R; i++) {
            const Lanes row = load(x + i * p.x_stride + k);
            for (size_t j = 0; j < O; j++) sums[i][j] = multiply_add(row, weights[j], sums[i][j]);
        }
    }
    if (const size_t rest = p.length - whole)
        for (size_t j = 0; j < O; j++) {
            const Lanes weights = load_some(w + j * p.w_stride + whole, rest);
            for (size_t i = 0; i < R; i++)
                sums[i][j] = multiply_add(load_some(x + i * p.x_stride + whole, rest), weights, sums[i][j]);
        }
    for (size_t i = 0; i < R; i++)
        for (size_t j = 0; j < O; j++) {
            float value = total(sums[i][j]);
            if (p.scale) value *= p.scale[o + j];
            if (p.bias) value += p.bias[o + j];
            p.y[(m + i) * p.y_stride + o + j] = value;
        }
}

// R rows by the outputs [first, end).
template <size_t R, class W>
void stripe(const Product<W>& p, size_t m, size_t first, size_t end, bool fetch) {
    constexpr size_t O = outputs_for(R);
    size_t o = first;
    if (fetch)
        for (; o + (TILES_AHEAD + 1) * O <= p.num_outputs && o + O <= end; o += O) tile<R, O, true>(p, m, o);
    for (; o + O <= end; o += O) tile<R, O, false>(p, m, o);
    for (; o < end; o++) tile<R, 1, false>(p, m, o);
}

template <class W>
void stripe_of(const Product<W>& p, size_t rows, size_t m, size_t first, size_t end, bool fetch) {
    switch (rows) {
        case 1: return stripe<1>(p, m, first, end, fetch);
        case 2: return stripe<2>(p, m, first, end, fetch);
        case 3: return stripe<3>(p, m, first, end, fetch);
        case 4: return stripe<4>(p, m, first, end, fetch);
        case 5: return stripe<5>(p, m, first, end, fetch);
        default: return stripe<6>(p, m, first, end, fetch);
    }
}

// All rows by the outputs [first, end): few outputs' weights meet all rows before the next ones are read.
template <class W>
void multiply(const Product<W>& p, size_t first, size_t end) {
    const size_t num_stripes = (p.num_rows + MOST_ROWS - 1) / MOST_ROWS;
    if (num_stripes == 1) return stripe_of(p, p.num_rows, 0, first, end, true);
    for (size_t o = first; o < end; o += OUTPUTS_AT_ONCE)
        for (size_t i = 0; i < num_stripes; i++) {
            const size_t m = i * p.num_rows / num_stripes, next = (i + 1) * p.num_rows / num_stripes;
            stripe_of(p, next - m, m, o, std::min(o + OUTPUTS_AT_ONCE, end), i == 0);
        }
}

// Threads that wait for parts of a product. One product at a time has them; another that comes meanwhile goes without.
class Helpers {
   public:
    // Calls part(i) for each i < count, part(0) in this thread.
    void run(size_t count, const std::function<void(size_t)>& part) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) {
            for (size_t i = 0; i < count; i++) part(i);
            return;
        }
        {
            std::lock_guard<std::mutex> guard(mutex_);
            while (num_threads_ < count - 1) {
                std::thread(&Helpers::work, this, ++num_threads_).detach();
            }
            part_ = &part;
            num_parts_ = count;
            num_open_ = count - 1;
            round_++;
        }
        begun_.notify_all();
        part(0);
        std::unique_lock<std::mutex> lock(mutex_);
        ended_.wait(lock, [this] { return num_open_ == 0; });
    }

   private:
    void work(size_t number) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            begun_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (number >= num_parts_) continue;
            const auto* part = part_;
            lock.unlock();
            (*part)(number);
            lock.lock();
            if (--num_open_ == 0) ended_.notify_one();
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable begun_, ended_;
    const std::function<void(size_t)>* part_ = nullptr;
    size_t num_threads_ = 0, num_parts_ = 0, num_open_ = 0;
    uint64_t round_ = 0;
};

Helpers& helpers() {
    static Helpers* forever = new Helpers;
    return *forever;
}

template <class W>
void multiply_with(const Product<W>& p, size_t num_threads) {
    if (num_threads <= 1) return multiply(p, 0, p.num_outputs);
    const size_t share = (p.num_outputs / num_threads + LANES) / LANES * LANES;
    helpers().run(num_threads, [&](size_t i) {
        const size_t first = std::min(i * share, p.num_outputs);
        multiply(p, first, i + 1 == num_threads ? p.num_outputs : std::min(first + share, p.num_outputs));
    });
}

}  // namespace

#define MOERAY_LINEAR(name, W)                                                                                     \
    extern "C" void name(const float* x, size_t x_stride, const W* w, size_t w_stride, const float* scale,         \
                         const float* bias, float* y, size_t y_stride, size_t num_rows, size_t num_outputs,        \
                         size_t length, size_t num_threads) {                                                      \
        multiply_with<W>({x, x_stride, w, w_stride, scale, bias, y, y_stride, num_rows, num_outputs, length},      \
                         num_threads);                                                                             \
    }

MOERAY_LINEAR(moeray_linear_f32, float)
MOERAY_LINEAR(moeray_linear_f16, Half)
MOERAY_LINEAR(moeray_linear_bf16, Brain)
MOERAY_LINEAR(moeray_linear_i8, int8_t)
