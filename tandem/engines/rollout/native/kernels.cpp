// What a decoder computes between its matrix products, on a CPU: attention over the paged cache, RMS norm,
// rotary embedding, gated activation. kernels.py compiles this file at first use, once per element type
// (-DBF16, or float). The arithmetic is float32. Results are rounded to the element type exactly where
// transformers' modules round, so that the rollout's log-probs stay close to those of the training forward.
//
// NaN and infinity pass through to the results. The engine finds them in the logits.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <omp.h>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kAccumulators = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8, kAccumulators = 8;
#else
constexpr int kLanes = 4, kAccumulators = 8;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// Elementwise work on fewer elements than this stays on one thread.
constexpr int64_t kSerial = 8192;

inline int32_t bits(float x) {
    int32_t out;
    std::memcpy(&out, &x, 4);
    return out;
}
inline Integers bits(Vector x) { return (Integers)x; }
inline float number(int32_t x) {
    float out;
    std::memcpy(&out, &x, 4);
    return out;
}
inline Vector number(Integers x) { return (Vector)x; }

#ifdef BF16
typedef uint16_t Element;
// Rounds to the nearest number, ties to even. NaN stays NaN.
inline float rounded(float x) {
    const int32_t b = bits(x), nearest = (b + 0x7fff + ((b >> 16) & 1)) & (int32_t)0xffff0000;
    return number(x == x ? nearest : 0x7fc00000);
}
inline Vector rounded(Vector x) {
    const Integers b = bits(x), nearest = (b + 0x7fff + ((b >> 16) & 1)) & (int32_t)0xffff0000;
    return number(x == x ? nearest : Integers{} + 0x7fc00000);
}
inline float load(Element x) { return number((int32_t)((uint32_t)x << 16)); }
inline Element store(float x) { return (Element)((uint32_t)bits(rounded(x)) >> 16); }
inline Vector load(const Element *from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return number(__builtin_convertvector(halves, Integers) << 16);
}
inline void store(Element *to, Vector x) {
    const Halves halves = __builtin_convertvector((bits(rounded(x)) >> 16) & 0xffff, Halves);
    std::memcpy(to, &halves, sizeof halves);
}
#else
typedef float Element;
inline float rounded(float x) { return x; }
inline Vector rounded(Vector x) { return x; }
inline float load(Element x) { return x; }
inline Element store(float x) { return x; }
inline Vector load(const Element *from) {
    Vector out;
    std::memcpy(&out, from, sizeof out);
    return out;
}
inline void store(Element *to, Vector x) { std::memcpy(to, &x, sizeof x); }
#endif

// e^x within 2 units in the last place for x in [-87, 88], clamped outside. T is float or Vector.
template <typename T>
inline T exponential(T x) {
    const T low = T{} - 87.0f, high = T{} + 88.0f;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const float magic = 12582912.0f;  // after adding it, the low bits are the nearest integer
    const T shifted = x * 1.44269504f + magic;
    const T n = shifted - magic;
    const T r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 as the sum of two parts
    T p = T{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * number((bits(shifted) - 0x4b400000 + 127) << 23);
}

// silu(gate) * up. T is float or Vector.
template <typename T>
inline T gated(T gate, T up) {
    return rounded(gate / (1.0f + exponential(-gate))) * up;
}

inline float largest(Vector x) {
    float out = x[0];
    for (int i = 1; i < kLanes; i++) out = x[i] > out ? x[i] : out;
    return out;
}

inline float sum(Vector x) {
    float out = 0;
    for (int i = 0; i < kLanes; i++) out += x[i];
    return out;
}

// The paged cache of one layer: keys (blocks, kv_heads, key_dim, block_size), values (blocks, kv_heads,
// block_size, value_dim).
struct Cache {
    const Element *keys, *values;
    int64_t kv_heads, key_dim, value_dim, block_size;
};

constexpr int64_t kTileRows = 8;
constexpr int64_t kChunk = 256;  // scores of this many columns are held at a time
constexpr int64_t kMaxValueDim = 512;

// The columns start..start+count-1 of one key head of one sequence.
struct Columns {
    const int32_t *table;
    int64_t head, start, count;

    int64_t vectors() const { return (count + kLanes - 1) / kLanes; }

    // The first column of a vector, relative to `start`. Beyond the last vector it is that of the last
    // vector.
    int64_t column(int64_t vector) const { return (vector < vectors() ? vector : vectors() - 1) * kLanes; }

    // The first coordinate of the key of column start + c. The next coordinate is block_size elements
    // further.
    const Element *key(const Cache &cache, int64_t c) const {
        const int64_t column = start + c, block = table[column / cache.block_size];
        return cache.keys + (block * cache.kv_heads + head) * cache.key_dim * cache.block_size +
               column % cache.block_size;
    }

    // The value of column start + c.
    const Element *value(const Cache &cache, int64_t c) const {
        const int64_t column = start + c, block = table[column / cache.block_size];
        return cache.values +
               ((block * cache.kv_heads + head) * cache.block_size + column % cache.block_size) * cache.value_dim;
    }
};

// Query rows that share one key head of one sequence: a token's heads, then those of the next token.
struct Tile {
    int64_t rows;
    const float *query[kTileRows];
    Element *out[kTileRows];
    int64_t first[kTileRows], last[kTileRows];  // the columns that each row sees
    const float *sink[kTileRows];               // the logit of each row that has no value, or null
    const int32_t *table;
    int64_t head;

    // The chunk of columns that begins at or before `start`.
    Columns chunk(int64_t start) const {
        const int64_t left = last[rows - 1] + 1 - start;
        return {table, head, start, left < kChunk ? left : kChunk};
    }
    Columns first_chunk() const { return chunk(first[0] / kLanes * kLanes); }
};

// scores[r][c] = query r . key c of the columns, for whole vectors. At the same time `next`, the data needed
// next, is prefetched: blocks are scattered in memory, and the processor cannot predict their addresses.
template <int ROWS>
void score(const Tile &tile, const Cache &cache, const Columns &now, const Columns &next, float (*scores)[kChunk]) {
    constexpr int kWide = kAccumulators / ROWS < 1 ? 1 : kAccumulators / ROWS > 8 ? 8 : kAccumulators / ROWS;
    const int64_t vectors = now.vectors();
    const int64_t value_step = kLanes * cache.value_dim / cache.key_dim;
    for (int64_t at = 0; at < vectors; at += kWide) {
        const Element *keys[kWide], *next_keys[kWide], *next_values[kWide];
        const Columns &after = at + kWide < vectors ? now : next;
        for (int c = 0; c < kWide; c++) {
            keys[c] = now.key(cache, now.column(at + c));
            const int64_t column = after.column(at + kWide < vectors ? at + kWide + c : c);
            next_keys[c] = after.key(cache, column);
            next_values[c] = after.value(cache, column);
        }
        Vector sums[ROWS][kWide] = {};
        for (int64_t d = 0; d < cache.key_dim; d++) {
            Vector key[kWide];
            for (int c = 0; c < kWide; c++) {
                key[c] = load(keys[c] + d * cache.block_size);
                __builtin_prefetch(next_keys[c] + d * cache.block_size, 0, 2);
                __builtin_prefetch(next_values[c] + d * value_step, 0, 2);
            }
            for (int r = 0; r < ROWS; r++) {
                const float q = tile.query[r][d];
                for (int c = 0; c < kWide; c++) sums[r][c] += q * key[c];
            }
        }
        for (int c = 0; c < kWide && at + c < vectors; c++)
            for (int r = 0; r < ROWS; r++) std::memcpy(&scores[r][(at + c) * kLanes], &sums[r][c], sizeof(Vector));
    }
}

// Converts scores to weights relative to the row's running maximum. Returns the factor for earlier sums.
inline float weigh(float *scores, int64_t start, int64_t count, int64_t first, int64_t last, float softcap,
                   float &peak, float &total) {
    if (softcap > 0)
        for (int64_t c = 0; c < count; c++) scores[c] = softcap * tanhf(scores[c] / softcap);
    Integers lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    const Vector none = Vector{} - FLT_MAX;
    Vector peaks = none;
    for (int64_t c = 0; c < count; c += kLanes) {
        Vector x;
        std::memcpy(&x, scores + c, sizeof x);
        const Integers column = lane + (int32_t)(start + c);
        x = ((column >= (int32_t)first) & (column <= (int32_t)last)) ? x : none;
        peaks = x > peaks ? x : peaks;
        std::memcpy(scores + c, &x, sizeof x);
    }
    const float highest = largest(peaks), before = peak;
    peak = highest > peak ? highest : peak;
    Vector totals = {};
    for (int64_t c = 0; c < count; c += kLanes) {
        Vector x;
        std::memcpy(&x, scores + c, sizeof x);
        const Vector weight = x == none ? Vector{} : exponential(x - peak);
        totals += weight;
        std::memcpy(scores + c, &weight, sizeof x);
    }
    const float scale = exponential(before - peak);
    total = total * scale + sum(totals);
    return scale;
}

// sums[r] = scale[r] * sums[r] + sum over columns c of weights[r][c] * value c.
template <int ROWS>
void mix(const Cache &cache, const Columns &now, const float (*weights)[kChunk], const float *scale,
         float (*sums)[kMaxValueDim]) {
    constexpr int kWide = kAccumulators / ROWS < 1 ? 1 : kAccumulators / ROWS > 4 ? 4 : kAccumulators / ROWS;
    int64_t e = 0;
    auto entries = [&](auto width) {
        constexpr int W = decltype(width)::value;
        Vector acc[ROWS][W];
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < W; w++) {
                std::memcpy(&acc[r][w], &sums[r][e + w * kLanes], sizeof(Vector));
                acc[r][w] *= scale[r];
            }
        for (int64_t c = 0; c < now.count;) {
            const Element *value = now.value(cache, c) + e;
            const int64_t left = cache.block_size - (now.start + c) % cache.block_size;
            const int64_t stop = c + left < now.count ? c + left : now.count;
            for (; c < stop; c++, value += cache.value_dim) {
                Vector v[W];
                for (int w = 0; w < W; w++) v[w] = load(value + w * kLanes);
                for (int r = 0; r < ROWS; r++)
                    for (int w = 0; w < W; w++) acc[r][w] += weights[r][c] * v[w];
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < W; w++) std::memcpy(&sums[r][e + w * kLanes], &acc[r][w], sizeof(Vector));
        e += W * kLanes;
    };
    while (e + kWide * kLanes <= cache.value_dim) entries(std::integral_constant<int, kWide>());
    while (e + kLanes <= cache.value_dim) entries(std::integral_constant<int, 1>());
    for (; e < cache.value_dim; e++)
        for (int r = 0; r < ROWS; r++) {
            sums[r][e] *= scale[r];
            for (int64_t c = 0; c < now.count; c++) sums[r][e] += weights[r][c] * load(now.value(cache, c)[e]);
        }
}

template <int ROWS>
void attend_tile(const Tile &tile, const Tile &next, const Cache &cache, float softcap) {
    alignas(64) float scores[ROWS][kChunk], sums[ROWS][kMaxValueDim];
    float peak[ROWS], total[ROWS], scale[ROWS];
    for (int r = 0; r < ROWS; r++) {
        peak[r] = tile.sink[r] ? *tile.sink[r] : -FLT_MAX;
        total[r] = tile.sink[r] ? 1 : 0;
        std::memset(sums[r], 0, cache.value_dim * sizeof(float));
    }
    const int64_t stop = tile.last[ROWS - 1] + 1;
    for (Columns now = tile.first_chunk(); now.start < stop;) {
        const int64_t after = now.start + kChunk;
        const Columns soon = after < stop ? tile.chunk(after) : next.first_chunk();
        score<ROWS>(tile, cache, now, soon, scores);
        for (int r = 0; r < ROWS; r++)
            scale[r] = weigh(scores[r], now.start, now.count, tile.first[r], tile.last[r], softcap, peak[r], total[r]);
        mix<ROWS>(cache, now, scores, scale, sums);
        if (after >= stop) break;
        now = soon;
    }
    for (int r = 0; r < ROWS; r++) {
        const float factor = 1 / total[r];
        for (int64_t e = 0; e < cache.value_dim; e++) tile.out[r][e] = store(sums[r][e] * factor);
    }
}

typedef void (*TileFunction)(const Tile &, const Tile &, const Cache &, float);
constexpr TileFunction kTiles[kTileRows] = {attend_tile<1>, attend_tile<2>, attend_tile<3>, attend_tile<4>,
                                            attend_tile<5>, attend_tile<6>, attend_tile<7>, attend_tile<8>};

inline int team(int64_t elements, int threads) { return elements < kSerial ? 1 : threads; }

inline float inverse_rms(const Element *x, int64_t width, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) squares += load(x[i]) * load(x[i]);
    return 1 / sqrtf(squares / width + eps);
}

}  // namespace

extern "C" {

int lanes() { return kLanes; }

int64_t max_value_dim() { return kMaxValueDim; }

// Writes the keys and values of a step's tokens into their slots. Strides count elements. The last stride is
// 1.
void write(const Element *keys, int64_t key_token, int64_t key_head, const Element *values, int64_t value_token,
           int64_t value_head, const int64_t *slots, Element *cache_keys, Element *cache_values, int64_t tokens,
           int64_t kv_heads, int64_t key_dim, int64_t value_dim, int64_t block_size, int threads) {
#pragma omp parallel for num_threads(team(tokens * kv_heads * (key_dim + value_dim), threads))
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        for (int64_t h = 0; h < kv_heads; h++) {
            const Element *key = keys + t * key_token + h * key_head;
            Element *to = cache_keys + (block * kv_heads + h) * key_dim * block_size + offset;
            for (int64_t d = 0; d < key_dim; d++) to[d * block_size] = key[d];
            std::memcpy(cache_values + ((block * kv_heads + h) * block_size + offset) * value_dim,
                        values + t * value_token + h * value_head, value_dim * sizeof(Element));
        }
    }
}

// Attention of a step's tokens, query (tokens, heads, key_dim) float32, out (tokens, heads, value_dim). A
// window, chunk or softcap of 0 means none. `sinks` (heads) may be null.
void attend(Element *out, const float *query, const Element *keys, const Element *values, const int32_t *starts,
            const int32_t *tables, int64_t table_width, const int64_t *positions, int64_t sequences, int64_t heads,
            int64_t kv_heads, int64_t key_dim, int64_t value_dim, int64_t block_size, int64_t window, int64_t chunk,
            float softcap, const float *sinks, int threads) {
    const Cache cache = {keys, values, kv_heads, key_dim, value_dim, block_size};
    const int64_t group = heads / kv_heads;
#pragma omp parallel num_threads(threads)
    {
        const int64_t team_size = omp_get_num_threads();
        int64_t turn = omp_get_thread_num();  // number of tiles until this thread's next tile
        Tile tile = {};
        auto run = [&](const Tile &next) {
            if (tile.rows) kTiles[tile.rows - 1](tile, next, cache, softcap);
        };
        for (int64_t s = 0; s < sequences; s++) {
            const int64_t begin = starts[s], rows = (starts[s + 1] - begin) * group;
            for (int64_t h = 0; h < kv_heads; h++)
                for (int64_t row = 0; row < rows; row += kTileRows) {
                    if (turn-- > 0) continue;
                    turn = team_size - 1;
                    Tile next = {rows - row < kTileRows ? rows - row : kTileRows, {}, {}, {}, {}, {},
                                 tables + s * table_width, h};
                    for (int64_t r = 0; r < next.rows; r++) {
                        const int64_t t = begin + (row + r) / group, n = h * group + (row + r) % group;
                        next.query[r] = query + (t * heads + n) * key_dim;
                        next.out[r] = out + (t * heads + n) * value_dim;
                        next.last[r] = positions[t];
                        const int64_t begins = chunk > 0 ? positions[t] / chunk * chunk : 0;
                        const int64_t oldest = window > 0 ? positions[t] - window + 1 : 0;
                        next.first[r] = begins > oldest ? begins : oldest;
                        next.sink[r] = sinks ? sinks + n : nullptr;
                    }
                    run(next);
                    tile = next;
                }
        }
        run(tile);
    }
}

// out = weight * rounded(x / rms(x)), over rows of `width`. If `added` is given, x += added is done first.
void norm(Element *out, Element *x, const Element *added, const Element *weight, int64_t rows, int64_t width,
          float eps, int threads) {
#pragma omp parallel for num_threads(team(rows *width, threads))
    for (int64_t row = 0; row < rows; row++) {
        Element *from = x + row * width, *to = out + row * width;
        if (added)
#pragma omp simd
            for (int64_t i = 0; i < width; i++) from[i] = store(load(from[i]) + load(added[row * width + i]));
        const float scale = inverse_rms(from, width, eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = store(load(weight[i]) * rounded(load(from[i]) * scale));
    }
}

// Rotates the queries and keys of qkv (tokens, heads + 2 kv_heads, dim). Keys are rotated in place. Queries
// go to `query` (tokens, heads, dim) float32, multiplied by `scale` after they are rounded. cos and sin are
// (positions, dim). Only the first `rotated` elements of a head are rotated. If norm weights (heads + kv_heads,
// dim) are given, each head is normalized first.
void rotate(float *query, Element *qkv, const Element *cos, const Element *sin, const int64_t *positions,
            const Element *norm, float eps, float scale, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
            int64_t rotated, int threads) {
    const int64_t half = rotated / 2;
#pragma omp parallel for num_threads(team(tokens *(heads + kv_heads) * dim, threads))
    for (int64_t t = 0; t < tokens; t++) {
        const Element *c = cos + positions[t] * dim, *s = sin + positions[t] * dim;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            Element *x = qkv + (t * (heads + 2 * kv_heads) + h) * dim;
            const bool is_query = h < heads;
            if (norm) {
                const float inverse = inverse_rms(x, dim, eps);
#pragma omp simd
                for (int64_t i = 0; i < dim; i++)
                    x[i] = store(load(norm[h * dim + i]) * rounded(load(x[i]) * inverse));
            }
            float *q = query + (t * heads + h) * dim;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float a = load(x[i]), b = load(x[i + half]);
                const float first = rounded(rounded(a * load(c[i])) - rounded(b * load(s[i])));
                const float second = rounded(rounded(b * load(c[i + half])) + rounded(a * load(s[i + half])));
                if (is_query) {
                    q[i] = first * scale;
                    q[i + half] = second * scale;
                } else {
                    x[i] = store(first);
                    x[i + half] = store(second);
                }
            }
            for (int64_t i = rotated; is_query && i < dim; i++) q[i] = load(x[i]) * scale;
        }
    }
}

// out = silu(gate) * up, for gate_up (rows, 2 width): gate first, then up.
void gate(Element *out, const Element *gate_up, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(team(rows *width, threads))
    for (int64_t row = 0; row < rows; row++) {
        const Element *g = gate_up + 2 * row * width, *up = g + width;
        Element *to = out + row * width;
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) store(to + i, gated(load(g + i), load(up + i)));
        for (; i < width; i++) to[i] = store(gated(load(g[i]), load(up[i])));
    }
}

}  // extern "C"
