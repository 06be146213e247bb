// The inner loops of a training step on a processor: what a framework's general operators do slowest between the large
// products.
//
// For float32 and bfloat16 numbers. All sums are in float32; what is stored is rounded once, to the nearest, ties to
// even. What is computed of one token, and in which order, depends on its own path alone, neither on what else is in
// the pass nor on the number of threads. Pointers and sizes are the caller's to check.

#include "dtypes.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

inline float sigmoid(float x) {
    const float e = exp_of_negative(x < 0 ? x : -x);
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// Fewer numbers than this are done before other threads have woken up.
constexpr int64_t WORTH_THREADS = 1 << 15;

constexpr int64_t LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

inline int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// ---- Small products, in registers -----------------------------------------------------------------------------------

// c[ROWS][VECTORS * LANES] += a b over `count` steps. Each sum runs in one order whatever the tile's shape.
template <int ROWS, int VECTORS>
inline void tile(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, int64_t count, float* c,
                 int64_t c_row) {
    Lanes sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECTORS; ++v) {
            std::memcpy(&sums[r][v], c + r * c_row + v * LANES, sizeof(Lanes));
        }
    }
    for (int64_t k = 0; k < count; ++k) {
        Lanes wide[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            std::memcpy(&wide[v], b + k * b_row + v * LANES, sizeof(Lanes));
        }
        for (int r = 0; r < ROWS; ++r) {
            const float factor = a[r * a_row + k * a_step];
            for (int v = 0; v < VECTORS; ++v) {
                sums[r][v] += factor * wide[v];
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECTORS; ++v) {
            std::memcpy(c + r * c_row + v * LANES, &sums[r][v], sizeof(Lanes));
        }
    }
}

template <int ROWS>
inline void stripe(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, int64_t count,
                   float* c, int64_t c_row, int64_t columns) {
    int64_t begin = 0;
    for (; begin + 4 * LANES <= columns; begin += 4 * LANES) {
        tile<ROWS, 4>(a, a_row, a_step, b + begin, b_row, count, c + begin, c_row);
    }
    for (; begin < columns; begin += LANES) {
        tile<ROWS, 1>(a, a_row, a_step, b + begin, b_row, count, c + begin, c_row);
    }
}

// c[rows, columns] += a b; columns is a whole number of lanes.
inline void product(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, int64_t count,
                    float* c, int64_t c_row, int64_t rows, int64_t columns) {
    int64_t row = 0;
    for (; row + 6 <= rows; row += 6) {
        stripe<6>(a + row * a_row, a_row, a_step, b, b_row, count, c + row * c_row, c_row, columns);
    }
    for (; row + 3 <= rows; row += 3) {
        stripe<3>(a + row * a_row, a_row, a_step, b, b_row, count, c + row * c_row, c_row, columns);
    }
    for (; row < rows; ++row) {
        stripe<1>(a + row * a_row, a_row, a_step, b, b_row, count, c + row * c_row, c_row, columns);
    }
}

// ---- Attention ------------------------------------------------------------------------------------------------------

// Tokens `begin` to `end` of the pass, each the child of the one before; the first one's `depth` ancestors are listed
// from `ancestors` on, and their places in what is summed up for each path begin at `path`.
struct Stretch {
    int64_t begin, end, depth, ancestors, path;
};

struct Shape {
    int64_t tokens, heads, kv_heads, dim, q_row, k_row, v_row, window;
    float scaling;
};

// Tokens of one stretch that are worked on together.
constexpr int64_t TOGETHER = 16;

// A head of one token, turned to its position (Su et al. 2021), as float32.
template <typename T>
inline void turned(const T* x, const T* cos, const T* sin, int64_t dim, float* y) {
    const int64_t half = dim / 2;
#pragma omp simd
    for (int64_t d = 0; d < half; ++d) {
        const float one = as_float(x[d]), two = as_float(x[d + half]);
        y[d] = one * as_float(cos[d]) - two * as_float(sin[d]);
        y[d + half] = two * as_float(cos[d + half]) + one * as_float(sin[d + half]);
    }
}

// What a gradient of a turned head is to the head itself.
template <typename T>
inline void turned_back(const float* y, const T* cos, const T* sin, int64_t dim, T* x) {
    const int64_t half = dim / 2;
#pragma omp simd
    for (int64_t d = 0; d < half; ++d) {
        store(y[d] * as_float(cos[d]) + y[d + half] * as_float(sin[d + half]), x[d]);
        store(y[d + half] * as_float(cos[d + half]) - y[d] * as_float(sin[d]), x[d + half]);
    }
}

// The keys and values that a stretch sees, of one head, gathered from its path; rows are padded with zeros.
template <typename T>
struct Path {
    std::vector<float> keys, values, keys_across, values_across;
    int64_t length, wide, across;

    void gather(const T* k, const T* v, const T* cos, const T* sin, const Shape& shape, const Stretch& stretch,
                const int64_t* ancestors, int64_t kv, bool backward) {
        const int64_t dim = shape.dim;
        length = stretch.depth + stretch.end - stretch.begin;
        wide = padded(dim);
        across = padded(length);
        keys.assign(length * wide, 0.0f);
        values.assign(length * wide, 0.0f);
        for (int64_t j = 0; j < length; ++j) {
            const int64_t t = j < stretch.depth ? ancestors[stretch.ancestors + j] : stretch.begin + j - stretch.depth;
            turned(k + t * shape.k_row + kv * dim, cos + t * dim, sin + t * dim, dim, &keys[j * wide]);
            const T* value = v + t * shape.v_row + kv * dim;
#pragma omp simd
            for (int64_t d = 0; d < dim; ++d) {
                values[j * wide + d] = as_float(value[d]);
            }
        }
        transpose(keys, keys_across, dim);
        if (backward) {
            transpose(values, values_across, dim);
        }
    }

    void transpose(const std::vector<float>& from, std::vector<float>& to, int64_t dim) const {
        to.assign(dim * across, 0.0f);
        for (int64_t j = 0; j < length; ++j) {
            for (int64_t d = 0; d < dim; ++d) {
                to[d * across + j] = from[j * wide + d];
            }
        }
    }
};

// Some tokens of a stretch: rows are (token, head of the group), so that those who see more come later.
struct Queries {
    int64_t first, count, rows, seen, columns;
};

inline Queries queries(const Stretch& stretch, int64_t first, int64_t group) {
    const int64_t left = stretch.end - stretch.begin - first, count = left < TOGETHER ? left : TOGETHER;
    const int64_t seen = stretch.depth + first + count;
    return {first, count, count * group, seen, padded(seen)};
}

template <typename T>
inline void load_queries(const T* q, const T* cos, const T* sin, const Shape& shape, const Stretch& stretch,
                         const Queries& some, int64_t kv, int64_t wide, std::vector<float>& query) {
    const int64_t group = shape.heads / shape.kv_heads;
    query.assign(some.rows * wide, 0.0f);
    for (int64_t i = 0; i < some.rows; ++i) {
        const int64_t t = stretch.begin + some.first + i / group, head = kv * group + i % group;
        turned(q + t * shape.q_row + head * shape.dim, cos + t * shape.dim, sin + t * shape.dim, shape.dim,
               &query[i * wide]);
    }
}

template <typename T>
void attend(const T* q, const T* k, const T* v, const T* cos, const T* sin, const Shape& shape,
            const Stretch* stretches, int64_t count, const int64_t* ancestors, T* out, float* sizes) {
    const int64_t group = shape.heads / shape.kv_heads, dim = shape.dim;
#pragma omp parallel
    {
        Path<T> path;
        std::vector<float> query, scores, sums;
#pragma omp for schedule(dynamic)
        for (int64_t work = 0; work < count * shape.kv_heads; ++work) {
            const Stretch& stretch = stretches[work / shape.kv_heads];
            const int64_t kv = work % shape.kv_heads;
            path.gather(k, v, cos, sin, shape, stretch, ancestors, kv, false);
            for (int64_t first = 0; first < stretch.end - stretch.begin; first += TOGETHER) {
                const Queries some = queries(stretch, first, group);
                load_queries(q, cos, sin, shape, stretch, some, kv, path.wide, query);
                scores.assign(some.rows * some.columns, 0.0f);
                product(query.data(), path.wide, 1, path.keys_across.data(), path.across, dim, scores.data(),
                        some.columns, some.rows, some.columns);
                for (int64_t i = 0; i < some.rows; ++i) {
                    float* row = &scores[i * some.columns];
                    const int64_t end = stretch.depth + first + i / group + 1;
                    const int64_t begin = shape.window > 0 && end > shape.window ? end - shape.window : 0;
                    float top = -INFINITY, total = 0;
#pragma omp simd reduction(max : top)
                    for (int64_t j = begin; j < end; ++j) {
                        top = row[j] > top ? row[j] : top;
                    }
#pragma omp simd reduction(+ : total)
                    for (int64_t j = begin; j < end; ++j) {
                        row[j] = exp_of_negative((row[j] - top) * shape.scaling);
                        total += row[j];
                    }
                    const float scale = 1 / total;
                    for (int64_t j = begin; j < end; ++j) {
                        row[j] *= scale;
                    }
                    for (int64_t j = 0; j < begin; ++j) {
                        row[j] = 0;
                    }
                    for (int64_t j = end; j < some.seen; ++j) {
                        row[j] = 0;
                    }
                    const int64_t t = stretch.begin + first + i / group;
                    sizes[t * shape.heads + kv * group + i % group] = top * shape.scaling + std::log(total);
                }
                sums.assign(some.rows * path.wide, 0.0f);
                product(scores.data(), some.columns, 1, path.values.data(), path.wide, some.seen, sums.data(),
                        path.wide, some.rows, path.wide);
                for (int64_t i = 0; i < some.rows; ++i) {
                    const int64_t t = stretch.begin + first + i / group, head = kv * group + i % group;
                    T* place = out + (t * shape.heads + head) * dim;
                    for (int64_t d = 0; d < dim; ++d) {
                        store(sums[i * path.wide + d], place[d]);
                    }
                }
            }
        }
    }
}

// Gradients of q, k and v, laid out as they are. `paths` is scratch for what each path adds to its keys and values,
// [2, tokens of all paths, kv heads, padded dim], summed up afterwards in one order.
template <typename T>
void attend_backward(const T* q, const T* k, const T* v, const T* cos, const T* sin, const Shape& shape,
                     const Stretch* stretches, int64_t count, const int64_t* ancestors, const T* grad,
                     const float* sizes, float* paths, int64_t paths_length, T* q_grad, T* k_grad, T* v_grad) {
    const int64_t group = shape.heads / shape.kv_heads, dim = shape.dim, wide = padded(dim);
    const int64_t path_row = shape.kv_heads * wide;
    float* const key_paths = paths;
    float* const value_paths = paths + paths_length * path_row;
#pragma omp parallel
    {
        Path<T> path;
        std::vector<float> query, given, weights, slopes, sums;
#pragma omp for schedule(dynamic)
        for (int64_t work = 0; work < count * shape.kv_heads; ++work) {
            const Stretch& stretch = stretches[work / shape.kv_heads];
            const int64_t kv = work % shape.kv_heads;
            path.gather(k, v, cos, sin, shape, stretch, ancestors, kv, true);
            float* const own_keys = key_paths + stretch.path * path_row + kv * wide;
            float* const own_values = value_paths + stretch.path * path_row + kv * wide;
            for (int64_t j = 0; j < path.length; ++j) {
                std::memset(own_keys + j * path_row, 0, wide * sizeof(float));
                std::memset(own_values + j * path_row, 0, wide * sizeof(float));
            }
            for (int64_t first = 0; first < stretch.end - stretch.begin; first += TOGETHER) {
                const Queries some = queries(stretch, first, group);
                load_queries(q, cos, sin, shape, stretch, some, kv, wide, query);
                given.assign(some.rows * wide, 0.0f);
                for (int64_t i = 0; i < some.rows; ++i) {
                    const int64_t t = stretch.begin + first + i / group, head = kv * group + i % group;
                    const T* place = grad + (t * shape.heads + head) * dim;
                    for (int64_t d = 0; d < dim; ++d) {
                        given[i * wide + d] = as_float(place[d]);
                    }
                }
                weights.assign(some.rows * some.columns, 0.0f);
                product(query.data(), wide, 1, path.keys_across.data(), path.across, dim, weights.data(), some.columns,
                        some.rows, some.columns);
                slopes.assign(some.rows * some.columns, 0.0f);
                product(given.data(), wide, 1, path.values_across.data(), path.across, dim, slopes.data(),
                        some.columns, some.rows, some.columns);
                for (int64_t i = 0; i < some.rows; ++i) {
                    const int64_t t = stretch.begin + first + i / group, head = kv * group + i % group;
                    float* weight = &weights[i * some.columns];
                    float* slope = &slopes[i * some.columns];
                    const int64_t end = stretch.depth + first + i / group + 1;
                    const int64_t begin = shape.window > 0 && end > shape.window ? end - shape.window : 0;
                    const float size = sizes[t * shape.heads + head];
                    float mean = 0;
#pragma omp simd reduction(+ : mean)
                    for (int64_t j = begin; j < end; ++j) {
                        // Rounding may lift the largest weight above 1 by a hair; the exponential takes none above 0.
                        const float exponent = weight[j] * shape.scaling - size;
                        weight[j] = exp_of_negative(exponent < 0 ? exponent : 0);
                        mean += weight[j] * slope[j];
                    }
#pragma omp simd
                    for (int64_t j = begin; j < end; ++j) {
                        slope[j] = weight[j] * (slope[j] - mean) * shape.scaling;
                    }
                    for (int64_t j = 0; j < begin; ++j) {
                        weight[j] = slope[j] = 0;
                    }
                    for (int64_t j = end; j < some.columns; ++j) {
                        weight[j] = slope[j] = 0;
                    }
                }
                sums.assign(some.rows * wide, 0.0f);
                product(slopes.data(), some.columns, 1, path.keys.data(), wide, some.seen, sums.data(), wide,
                        some.rows, wide);
                for (int64_t i = 0; i < some.rows; ++i) {
                    const int64_t t = stretch.begin + first + i / group, head = kv * group + i % group;
                    turned_back(&sums[i * wide], cos + t * dim, sin + t * dim, dim,
                                q_grad + t * shape.q_row + head * dim);
                }
                product(slopes.data(), 1, some.columns, query.data(), wide, some.rows, own_keys, path_row, some.seen,
                        wide);
                product(weights.data(), 1, some.columns, given.data(), wide, some.rows, own_values, path_row,
                        some.seen, wide);
            }
        }
        std::vector<float> key_sum(shape.tokens * wide), value_sum(shape.tokens * wide);
#pragma omp for schedule(static)
        for (int64_t kv = 0; kv < shape.kv_heads; ++kv) {
            std::memset(key_sum.data(), 0, key_sum.size() * sizeof(float));
            std::memset(value_sum.data(), 0, value_sum.size() * sizeof(float));
            for (int64_t s = 0; s < count; ++s) {
                const Stretch& stretch = stretches[s];
                const int64_t length = stretch.depth + stretch.end - stretch.begin;
                for (int64_t j = 0; j < length; ++j) {
                    const int64_t t =
                        j < stretch.depth ? ancestors[stretch.ancestors + j] : stretch.begin + j - stretch.depth;
                    const float* key = key_paths + (stretch.path + j) * path_row + kv * wide;
                    const float* value = value_paths + (stretch.path + j) * path_row + kv * wide;
#pragma omp simd
                    for (int64_t d = 0; d < wide; ++d) {
                        key_sum[t * wide + d] += key[d];
                        value_sum[t * wide + d] += value[d];
                    }
                }
            }
            for (int64_t t = 0; t < shape.tokens; ++t) {
                turned_back(&key_sum[t * wide], cos + t * dim, sin + t * dim, dim, k_grad + t * shape.k_row + kv * dim);
                T* place = v_grad + t * shape.v_row + kv * dim;
                for (int64_t d = 0; d < dim; ++d) {
                    store(value_sum[t * wide + d], place[d]);
                }
            }
        }
    }
}

// ---- Row by row -----------------------------------------------------------------------------------------------------

// The gradient of x / rms(x) * weight (Zhang & Sennrich 2019) to x.
template <typename T>
void norm_backward(const T* x, const T* weight, const T* grad, T* out, int64_t tokens, int64_t size, float epsilon) {
#pragma omp parallel for if (tokens * size > WORTH_THREADS)
    for (int64_t t = 0; t < tokens; ++t) {
        const T *row = x + t * size, *given = grad + t * size;
        T* result = out + t * size;
        float squares = 0, along = 0;
#pragma omp simd reduction(+ : squares, along)
        for (int64_t i = 0; i < size; ++i) {
            const float value = as_float(row[i]);
            squares += value * value;
            along += value * as_float(given[i]) * as_float(weight[i]);
        }
        const float scale = 1 / std::sqrt(squares / size + epsilon);
        const float back = along * scale * scale / size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            store(scale * (as_float(given[i]) * as_float(weight[i]) - as_float(row[i]) * back), result[i]);
        }
    }
}

// silu(gate) * up (Shazeer 2020), where x holds both side by side.
template <typename T>
void gate(const T* x, T* y, int64_t tokens, int64_t size) {
#pragma omp parallel for if (tokens * size > WORTH_THREADS)
    for (int64_t t = 0; t < tokens; ++t) {
        const T *gates = x + t * 2 * size, *up = gates + size;
        T* result = y + t * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float g = as_float(gates[i]);
            store(g * sigmoid(g) * as_float(up[i]), result[i]);
        }
    }
}

template <typename T>
void gate_backward(const T* x, const T* grad, T* out, int64_t tokens, int64_t size) {
#pragma omp parallel for if (tokens * size > WORTH_THREADS)
    for (int64_t t = 0; t < tokens; ++t) {
        const T *gates = x + t * 2 * size, *up = gates + size, *given = grad + t * size;
        T *gate_out = out + t * 2 * size, *up_out = gate_out + size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float g = as_float(gates[i]), s = sigmoid(g), slope = as_float(given[i]);
            store(slope * as_float(up[i]) * s * (1.0f + g * (1.0f - s)), gate_out[i]);
            store(slope * g * s, up_out[i]);
        }
    }
}

// log(sum(exp(row))) of each row.
template <typename T>
void totals(const T* x, float* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* values = x + row * size;
        float top = -INFINITY, total = 0;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < size; ++i) {
            const float value = as_float(values[i]);
            top = value > top ? value : top;
        }
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < size; ++i) {
            total += exp_of_negative(as_float(values[i]) - top);
        }
        out[row] = top + std::log(total);
    }
}

// The gradient of each row's log-prob of one token: slope * (1 at the token - probability).
template <typename T>
void likelihood_backward(const T* x, const float* total, const int64_t* tokens, const float* slope, T* out,
                         int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* values = x + row * size;
        T* result = out + row * size;
        const float down = -slope[row], whole = total[row];
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float exponent = as_float(values[i]) - whole;
            store(down * exp_of_negative(exponent < 0 ? exponent : 0), result[i]);
        }
        const float exponent = as_float(values[tokens[row]]) - whole;
        store(slope[row] * (1 - exp_of_negative(exponent < 0 ? exponent : 0)), result[tokens[row]]);
    }
}

// How far each row's distribution q is from p: the sum of p (log p - log q) (Kullback & Leibler 1951).
template <typename T>
void divergence(const T* p, const float* p_total, const T* q, const float* q_total, float* out, int64_t rows,
                int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T *from = p + row * size, *to = q + row * size;
        const float from_total = p_total[row], to_total = q_total[row];
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; ++i) {
            float known = as_float(from[i]) - from_total;
            known = known < 0 ? known : 0;
            sum += exp_of_negative(known) * (known - (as_float(to[i]) - to_total));
        }
        out[row] = sum;
    }
}

// The gradient of that to q's logits: slope * (q - p).
template <typename T>
void divergence_backward(const T* p, const float* p_total, const T* q, const float* q_total, const float* slope,
                         T* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T *from = p + row * size, *to = q + row * size;
        T* result = out + row * size;
        const float from_total = p_total[row], to_total = q_total[row], factor = slope[row];
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float known = as_float(from[i]) - from_total, said = as_float(to[i]) - to_total;
            const float apart = exp_of_negative(said < 0 ? said : 0) - exp_of_negative(known < 0 ? known : 0);
            store(factor * apart, result[i]);
        }
    }
}

}  // namespace

#define EXPORT(SUFFIX, T)                                                                                              \
    void attend_##SUFFIX(const T* q, const T* k, const T* v, const T* cos, const T* sin, const int64_t* sizes,         \
                         float scaling, const Stretch* stretches, int64_t count, const int64_t* ancestors, T* out,     \
                         float* totals_out) {                                                                          \
        const Shape shape = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], scaling}; \
        attend(q, k, v, cos, sin, shape, stretches, count, ancestors, out, totals_out);                                \
    }                                                                                                                  \
    void attend_backward_##SUFFIX(const T* q, const T* k, const T* v, const T* cos, const T* sin,                      \
                                  const int64_t* sizes, float scaling, const Stretch* stretches, int64_t count,        \
                                  const int64_t* ancestors, const T* grad, const float* totals_in, float* paths,       \
                                  int64_t paths_length, T* q_grad, T* k_grad, T* v_grad) {                             \
        const Shape shape = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], scaling}; \
        attend_backward(q, k, v, cos, sin, shape, stretches, count, ancestors, grad, totals_in, paths, paths_length,   \
                        q_grad, k_grad, v_grad);                                                                       \
    }                                                                                                                  \
    void norm_backward_##SUFFIX(const T* x, const T* weight, const T* grad, T* out, int64_t tokens, int64_t size,      \
                                float epsilon) {                                                                       \
        norm_backward(x, weight, grad, out, tokens, size, epsilon);                                                    \
    }                                                                                                                  \
    void gate_##SUFFIX(const T* x, T* y, int64_t tokens, int64_t size) { gate(x, y, tokens, size); }                   \
    void gate_backward_##SUFFIX(const T* x, const T* grad, T* out, int64_t tokens, int64_t size) {                     \
        gate_backward(x, grad, out, tokens, size);                                                                     \
    }                                                                                                                  \
    void totals_##SUFFIX(const T* x, float* out, int64_t rows, int64_t size) { totals(x, out, rows, size); }           \
    void likelihood_backward_##SUFFIX(const T* x, const float* total, const int64_t* tokens, const float* slope,       \
                                      T* out, int64_t rows, int64_t size) {                                            \
        likelihood_backward(x, total, tokens, slope, out, rows, size);                                                 \
    }                                                                                                                  \
    void divergence_##SUFFIX(const T* p, const float* p_total, const T* q, const float* q_total, float* out,           \
                             int64_t rows, int64_t size) {                                                             \
        divergence(p, p_total, q, q_total, out, rows, size);                                                           \
    }                                                                                                                  \
    void divergence_backward_##SUFFIX(const T* p, const float* p_total, const T* q, const float* q_total,              \
                                      const float* slope, T* out, int64_t rows, int64_t size) {                        \
        divergence_backward(p, p_total, q, q_total, slope, out, rows, size);                                           \
    }

extern "C" {
EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)
}
