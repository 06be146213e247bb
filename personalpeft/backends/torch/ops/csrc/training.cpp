// CPU operations of a training step and their gradients.
//
// Sums are in float32. Results are rounded once, to nearest even. The operations for one token and
// their order depend on its own path alone. They depend neither on the rest of the pass nor on the
// number of threads. The caller checks pointers and sizes.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dtypes.h"

namespace {

inline float sigmoid(float x) {
    const float e = exp_of_negative(x < 0 ? x : -x);
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// Rows are padded to a multiple of this.
constexpr int64_t LANES = 16;

// A tile of 6 rows and `WIDE` vectors takes 24 of AVX-512's 32 registers, or 12 of the 16 of AVX2.
constexpr int64_t WIDE = VECTOR == 16 ? 4 : 2;

inline int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// ---- Small matrix products in registers ----

// c[ROWS][VECTORS * VECTOR] += a b over `count` steps. The order of each sum does not depend on the
// tile's shape.
template <int ROWS, int VECTORS>
inline void gemm_tile(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row,
                      int64_t count, float* c, int64_t c_row) {
    Vector sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECTORS; ++v) {
            std::memcpy(&sums[r][v], c + r * c_row + v * VECTOR, sizeof(Vector));
        }
    }
    for (int64_t k = 0; k < count; ++k) {
        Vector wide[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            std::memcpy(&wide[v], b + k * b_row + v * VECTOR, sizeof(Vector));
        }
        for (int r = 0; r < ROWS; ++r) {
            const float factor = a[r * a_row + k * a_step];
            for (int v = 0; v < VECTORS; ++v) {
                sums[r][v] = multiply_add(factor, wide[v], sums[r][v]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECTORS; ++v) {
            std::memcpy(c + r * c_row + v * VECTOR, &sums[r][v], sizeof(Vector));
        }
    }
}

template <int ROWS>
inline void gemm_rows(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row,
                      int64_t count, float* c, int64_t c_row, int64_t columns) {
    int64_t begin = 0;
    for (; begin + WIDE * VECTOR <= columns; begin += WIDE * VECTOR) {
        gemm_tile<ROWS, WIDE>(a, a_row, a_step, b + begin, b_row, count, c + begin, c_row);
    }
    for (; begin < columns; begin += VECTOR) {
        gemm_tile<ROWS, 1>(a, a_row, a_step, b + begin, b_row, count, c + begin, c_row);
    }
}

// c[rows, columns] += a b, where columns is a multiple of LANES.
inline void gemm(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row,
                 int64_t count, float* c, int64_t c_row, int64_t rows, int64_t columns) {
    int64_t row = 0;
    for (; row + 6 <= rows; row += 6) {
        gemm_rows<6>(a + row * a_row, a_row, a_step, b, b_row, count, c + row * c_row, c_row,
                     columns);
    }
    for (; row + 3 <= rows; row += 3) {
        gemm_rows<3>(a + row * a_row, a_row, a_step, b, b_row, count, c + row * c_row, c_row,
                     columns);
    }
    for (; row < rows; ++row) {
        gemm_rows<1>(a + row * a_row, a_row, a_step, b, b_row, count, c + row * c_row, c_row,
                     columns);
    }
}

// ---- Attention ----

// Tokens `begin` to `end` of the pass, each the child of the one before. `depth` is the number of
// ancestors of the first, `ancestors` their offset in the list. `path` is the segment's offset in
// the gradients of all paths.
struct Segment {
    int64_t begin, end, depth, ancestors, path;
};

struct Shape {
    int64_t tokens, heads, kv_heads, dim, q_row, k_row, v_row, window;
};

// Tokens of one segment in a tile of queries.
constexpr int64_t QUERY_TILE = 16;

// Apply the rotary embedding (RoFormer, Su et al. 2021, eq. 34) to one head of one token, in
// float32.
inline void rotate(const T* x, const T* cos, const T* sin, int64_t dim, float* y) {
    const int64_t half = dim / 2;
#pragma omp simd
    for (int64_t d = 0; d < half; ++d) {
        const float one = as_float(x[d]), two = as_float(x[d + half]);
        y[d] = one * as_float(cos[d]) - two * as_float(sin[d]);
        y[d + half] = two * as_float(cos[d + half]) + one * as_float(sin[d + half]);
    }
}

// Compute the gradient of a head from that of the rotated head.
inline void rotate_backward(const float* y, const T* cos, const T* sin, int64_t dim, T* x) {
    const int64_t half = dim / 2;
#pragma omp simd
    for (int64_t d = 0; d < half; ++d) {
        store(y[d] * as_float(cos[d]) + y[d + half] * as_float(sin[d + half]), x[d]);
        store(y[d + half] * as_float(cos[d + half]) - y[d] * as_float(sin[d]), x[d + half]);
    }
}

// The float32 keys and values of one head on a segment's path. Rows are padded with zeros.
struct Path {
    std::vector<float> keys, values, keys_transposed, values_transposed;
    int64_t length, row_stride, column_stride;

    void gather(const T* k, const T* v, const T* cos, const T* sin, const Shape& shape,
                const Segment& segment, const int64_t* ancestors, int64_t kv, bool backward) {
        const int64_t dim = shape.dim;
        length = segment.depth + segment.end - segment.begin;
        row_stride = padded(dim);
        column_stride = padded(length);
        keys.assign(length * row_stride, 0.0f);
        values.assign(length * row_stride, 0.0f);
        for (int64_t j = 0; j < length; ++j) {
            const int64_t t = j < segment.depth ? ancestors[segment.ancestors + j]
                                                : segment.begin + j - segment.depth;
            rotate(k + t * shape.k_row + kv * dim, cos + t * dim, sin + t * dim, dim,
                   &keys[j * row_stride]);
            const T* value = v + t * shape.v_row + kv * dim;
#pragma omp simd
            for (int64_t d = 0; d < dim; ++d) {
                values[j * row_stride + d] = as_float(value[d]);
            }
        }
        transpose(keys, keys_transposed, dim);
        if (backward) {
            transpose(values, values_transposed, dim);
        }
    }

    void transpose(const std::vector<float>& from, std::vector<float>& to, int64_t dim) const {
        to.assign(dim * column_stride, 0.0f);
        for (int64_t j = 0; j < length; ++j) {
            for (int64_t d = 0; d < dim; ++d) {
                to[d * column_stride + j] = from[j * row_stride + d];
            }
        }
    }
};

// A tile of queries. Rows are (token, head of the group), so later rows see more keys.
struct Queries {
    int64_t first, count, rows, seen, columns;
};

inline Queries queries(const Segment& segment, int64_t first, int64_t group) {
    const int64_t left = segment.end - segment.begin - first,
                  count = left < QUERY_TILE ? left : QUERY_TILE;
    const int64_t seen = segment.depth + first + count;
    return {first, count, count * group, seen, padded(seen)};
}

inline void load_queries(const T* q, const T* cos, const T* sin, const Shape& shape,
                         const Segment& segment, const Queries& tile, int64_t kv, int64_t wide,
                         std::vector<float>& query) {
    const int64_t group = shape.heads / shape.kv_heads;
    query.assign(tile.rows * wide, 0.0f);
    for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t t = segment.begin + tile.first + i / group, head = kv * group + i % group;
        rotate(q + t * shape.q_row + head * shape.dim, cos + t * shape.dim, sin + t * shape.dim,
               shape.dim, &query[i * wide]);
    }
}

}  // namespace

extern "C" {

// Attention of each token over its path. `lse` receives the log-sum-exp of each token's scores
// (FlashAttention-2, Dao 2023), from which the backward pass recomputes the weights.
void attention(const T* q, const T* k, const T* v, const T* cos, const T* sin, const Shape& shape,
               float scaling, const Segment* segments, int64_t count, const int64_t* ancestors,
               T* out, float* lse) {
    const int64_t group = shape.heads / shape.kv_heads, dim = shape.dim;
#pragma omp parallel
    {
        Path path;
        std::vector<float> query, scores, sums;
#pragma omp for schedule(dynamic)
        for (int64_t work = 0; work < count * shape.kv_heads; ++work) {
            const Segment& segment = segments[work / shape.kv_heads];
            const int64_t kv = work % shape.kv_heads;
            path.gather(k, v, cos, sin, shape, segment, ancestors, kv, false);
            for (int64_t first = 0; first < segment.end - segment.begin; first += QUERY_TILE) {
                const Queries tile = queries(segment, first, group);
                load_queries(q, cos, sin, shape, segment, tile, kv, path.row_stride, query);
                scores.assign(tile.rows * tile.columns, 0.0f);
                gemm(query.data(), path.row_stride, 1, path.keys_transposed.data(),
                     path.column_stride, dim, scores.data(), tile.columns, tile.rows, tile.columns);
                for (int64_t i = 0; i < tile.rows; ++i) {
                    float* row = &scores[i * tile.columns];
                    const int64_t end = segment.depth + first + i / group + 1;
                    const int64_t begin =
                        shape.window > 0 && end > shape.window ? end - shape.window : 0;
                    float max_value = -INFINITY, total = 0;
#pragma omp simd reduction(max : max_value)
                    for (int64_t j = begin; j < end; ++j) {
                        max_value = row[j] > max_value ? row[j] : max_value;
                    }
#pragma omp simd reduction(+ : total)
                    for (int64_t j = begin; j < end; ++j) {
                        row[j] = exp_of_negative((row[j] - max_value) * scaling);
                        total += row[j];
                    }
                    const float scale = 1 / total;
                    for (int64_t j = begin; j < end; ++j) {
                        row[j] *= scale;
                    }
                    for (int64_t j = 0; j < begin; ++j) {
                        row[j] = 0;
                    }
                    for (int64_t j = end; j < tile.seen; ++j) {
                        row[j] = 0;
                    }
                    const int64_t t = segment.begin + first + i / group;
                    lse[t * shape.heads + kv * group + i % group] =
                        max_value * scaling + std::log(total);
                }
                sums.assign(tile.rows * path.row_stride, 0.0f);
                gemm(scores.data(), tile.columns, 1, path.values.data(), path.row_stride, tile.seen,
                     sums.data(), path.row_stride, tile.rows, path.row_stride);
                for (int64_t i = 0; i < tile.rows; ++i) {
                    const int64_t t = segment.begin + first + i / group,
                                  head = kv * group + i % group;
                    T* target = out + (t * shape.heads + head) * dim;
                    for (int64_t d = 0; d < dim; ++d) {
                        store(sums[i * path.row_stride + d], target[d]);
                    }
                }
            }
        }
    }
}

// Gradients of q, k and v, with their strides. `path_grads` is scratch for the gradients of each
// path's keys and values. Its shape is [2, tokens of all paths, kv heads, padded dim]. They are
// summed afterwards in a fixed order.
void attention_backward(const T* q, const T* k, const T* v, const T* cos, const T* sin,
                        const Shape& shape, float scaling, const Segment* segments, int64_t count,
                        const int64_t* ancestors, const T* grad, const float* lse,
                        float* path_grads, int64_t paths_length, T* q_grad, T* k_grad, T* v_grad) {
    const int64_t group = shape.heads / shape.kv_heads, dim = shape.dim, wide = padded(dim);
    const int64_t path_row = shape.kv_heads * wide;
    float* const key_paths = path_grads;
    float* const value_paths = path_grads + paths_length * path_row;
#pragma omp parallel
    {
        Path path;
        std::vector<float> query, grads, weights, score_grads, sums;
#pragma omp for schedule(dynamic)
        for (int64_t work = 0; work < count * shape.kv_heads; ++work) {
            const Segment& segment = segments[work / shape.kv_heads];
            const int64_t kv = work % shape.kv_heads;
            path.gather(k, v, cos, sin, shape, segment, ancestors, kv, true);
            float* const own_keys = key_paths + segment.path * path_row + kv * wide;
            float* const own_values = value_paths + segment.path * path_row + kv * wide;
            for (int64_t j = 0; j < path.length; ++j) {
                std::memset(own_keys + j * path_row, 0, wide * sizeof(float));
                std::memset(own_values + j * path_row, 0, wide * sizeof(float));
            }
            for (int64_t first = 0; first < segment.end - segment.begin; first += QUERY_TILE) {
                const Queries tile = queries(segment, first, group);
                load_queries(q, cos, sin, shape, segment, tile, kv, wide, query);
                grads.assign(tile.rows * wide, 0.0f);
                for (int64_t i = 0; i < tile.rows; ++i) {
                    const int64_t t = segment.begin + first + i / group,
                                  head = kv * group + i % group;
                    const T* target = grad + (t * shape.heads + head) * dim;
                    for (int64_t d = 0; d < dim; ++d) {
                        grads[i * wide + d] = as_float(target[d]);
                    }
                }
                weights.assign(tile.rows * tile.columns, 0.0f);
                gemm(query.data(), wide, 1, path.keys_transposed.data(), path.column_stride, dim,
                     weights.data(), tile.columns, tile.rows, tile.columns);
                score_grads.assign(tile.rows * tile.columns, 0.0f);
                gemm(grads.data(), wide, 1, path.values_transposed.data(), path.column_stride, dim,
                     score_grads.data(), tile.columns, tile.rows, tile.columns);
                for (int64_t i = 0; i < tile.rows; ++i) {
                    const int64_t t = segment.begin + first + i / group,
                                  head = kv * group + i % group;
                    float* weight = &weights[i * tile.columns];
                    float* score_grad = &score_grads[i * tile.columns];
                    const int64_t end = segment.depth + first + i / group + 1;
                    const int64_t begin =
                        shape.window > 0 && end > shape.window ? end - shape.window : 0;
                    const float row_lse = lse[t * shape.heads + head];
                    float mean = 0;
#pragma omp simd reduction(+ : mean)
                    for (int64_t j = begin; j < end; ++j) {
                        // Rounding can make the exponent positive. exp_of_negative would then be
                        // wrong.
                        const float exponent = weight[j] * scaling - row_lse;
                        weight[j] = exp_of_negative(exponent < 0 ? exponent : 0);
                        mean += weight[j] * score_grad[j];
                    }
#pragma omp simd
                    for (int64_t j = begin; j < end; ++j) {
                        score_grad[j] = weight[j] * (score_grad[j] - mean) * scaling;
                    }
                    for (int64_t j = 0; j < begin; ++j) {
                        weight[j] = score_grad[j] = 0;
                    }
                    for (int64_t j = end; j < tile.columns; ++j) {
                        weight[j] = score_grad[j] = 0;
                    }
                }
                sums.assign(tile.rows * wide, 0.0f);
                gemm(score_grads.data(), tile.columns, 1, path.keys.data(), wide, tile.seen,
                     sums.data(), wide, tile.rows, wide);
                for (int64_t i = 0; i < tile.rows; ++i) {
                    const int64_t t = segment.begin + first + i / group,
                                  head = kv * group + i % group;
                    rotate_backward(&sums[i * wide], cos + t * dim, sin + t * dim, dim,
                                    q_grad + t * shape.q_row + head * dim);
                }
                gemm(score_grads.data(), 1, tile.columns, query.data(), wide, tile.rows, own_keys,
                     path_row, tile.seen, wide);
                gemm(weights.data(), 1, tile.columns, grads.data(), wide, tile.rows, own_values,
                     path_row, tile.seen, wide);
            }
        }
        std::vector<float> key_sum(shape.tokens * wide), value_sum(shape.tokens * wide);
#pragma omp for schedule(static)
        for (int64_t kv = 0; kv < shape.kv_heads; ++kv) {
            std::memset(key_sum.data(), 0, key_sum.size() * sizeof(float));
            std::memset(value_sum.data(), 0, value_sum.size() * sizeof(float));
            for (int64_t s = 0; s < count; ++s) {
                const Segment& segment = segments[s];
                const int64_t length = segment.depth + segment.end - segment.begin;
                for (int64_t j = 0; j < length; ++j) {
                    const int64_t t = j < segment.depth ? ancestors[segment.ancestors + j]
                                                        : segment.begin + j - segment.depth;
                    const float* key = key_paths + (segment.path + j) * path_row + kv * wide;
                    const float* value = value_paths + (segment.path + j) * path_row + kv * wide;
#pragma omp simd
                    for (int64_t d = 0; d < wide; ++d) {
                        key_sum[t * wide + d] += key[d];
                        value_sum[t * wide + d] += value[d];
                    }
                }
            }
            for (int64_t t = 0; t < shape.tokens; ++t) {
                rotate_backward(&key_sum[t * wide], cos + t * dim, sin + t * dim, dim,
                                k_grad + t * shape.k_row + kv * dim);
                T* target = v_grad + t * shape.v_row + kv * dim;
                for (int64_t d = 0; d < dim; ++d) {
                    store(value_sum[t * wide + d], target[d]);
                }
            }
        }
    }
}

// ---- Row-wise operations ----

// Gradient of RMSNorm, x / rms(x) * weight (Zhang & Sennrich 2019), with respect to x.
void rms_norm_backward(const T* x, const T* weight, const T* grad, T* out, int64_t tokens,
                       int64_t size, float epsilon) {
#pragma omp parallel for if (tokens * size > WORTH_THREADS)
    for (int64_t t = 0; t < tokens; ++t) {
        const T *row = x + t * size, *grad_row = grad + t * size;
        T* result = out + t * size;
        float squares = 0, dot = 0;
#pragma omp simd reduction(+ : squares, dot)
        for (int64_t i = 0; i < size; ++i) {
            const float value = as_float(row[i]);
            squares += value * value;
            dot += value * as_float(grad_row[i]) * as_float(weight[i]);
        }
        const float scale = 1 / std::sqrt(squares / size + epsilon);
        const float correction = dot * scale * scale / size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            store(scale *
                      (as_float(grad_row[i]) * as_float(weight[i]) - as_float(row[i]) * correction),
                  result[i]);
        }
    }
}

// SwiGLU (Shazeer 2020): silu(gate) * up, where each row of x is gate and up, concatenated.
void silu_and_mul(const T* x, T* y, int64_t tokens, int64_t size) {
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

void silu_and_mul_backward(const T* x, const T* grad, T* out, int64_t tokens, int64_t size) {
#pragma omp parallel for if (tokens * size > WORTH_THREADS)
    for (int64_t t = 0; t < tokens; ++t) {
        const T *gates = x + t * 2 * size, *up = gates + size, *grad_row = grad + t * size;
        T *gate_out = out + t * 2 * size, *up_out = gate_out + size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float g = as_float(gates[i]), s = sigmoid(g), slope = as_float(grad_row[i]);
            store(slope * as_float(up[i]) * s * (1.0f + g * (1.0f - s)), gate_out[i]);
            store(slope * g * s, up_out[i]);
        }
    }
}

// log(sum(exp(row))) of each row.
void logsumexp(const T* x, float* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* values = x + row * size;
        float max_value = -INFINITY, total = 0;
#pragma omp simd reduction(max : max_value)
        for (int64_t i = 0; i < size; ++i) {
            const float value = as_float(values[i]);
            max_value = value > max_value ? value : max_value;
        }
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < size; ++i) {
            total += exp_of_negative(as_float(values[i]) - max_value);
        }
        out[row] = max_value + std::log(total);
    }
}

// Gradient of each row's log-prob of one token with respect to the logits: slope * (onehot(token) -
// softmax(x)).
void token_logprob_backward(const T* x, const float* lse, const int64_t* tokens, const float* slope,
                            T* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* values = x + row * size;
        T* result = out + row * size;
        const float down = -slope[row], row_lse = lse[row];
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float exponent = as_float(values[i]) - row_lse;
            store(down * exp_of_negative(exponent < 0 ? exponent : 0), result[i]);
        }
        const float exponent = as_float(values[tokens[row]]) - row_lse;
        store(slope[row] * (1 - exp_of_negative(exponent < 0 ? exponent : 0)), result[tokens[row]]);
    }
}

// KL divergence of each row, sum of p (log p - log q) (Kullback & Leibler 1951).
void kl_div(const T* p, const float* p_lse, const T* q, const float* q_lse, float* out,
            int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T *from = p + row * size, *to = q + row * size;
        const float from_lse = p_lse[row], to_lse = q_lse[row];
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; ++i) {
            float log_p = as_float(from[i]) - from_lse;
            log_p = log_p < 0 ? log_p : 0;
            sum += exp_of_negative(log_p) * (log_p - (as_float(to[i]) - to_lse));
        }
        out[row] = sum;
    }
}

// Gradient of the KL divergence with respect to the logits of q: slope * (q - p).
void kl_div_backward(const T* p, const float* p_lse, const T* q, const float* q_lse,
                     const float* slope, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T *from = p + row * size, *to = q + row * size;
        T* result = out + row * size;
        const float from_lse = p_lse[row], to_lse = q_lse[row], factor = slope[row];
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float log_p = as_float(from[i]) - from_lse, log_q = as_float(to[i]) - to_lse;
            const float diff =
                exp_of_negative(log_q < 0 ? log_q : 0) - exp_of_negative(log_p < 0 ? log_p : 0);
            store(factor * diff, result[i]);
        }
    }
}

}  // extern "C"
