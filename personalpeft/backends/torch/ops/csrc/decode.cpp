// CPU operations of a decoding step.
//
// Each function computes what the method of the same name in ops/base.py computes. Sums are
// in float32. Results are rounded once, to nearest even. Functions keep no state. The caller checks
// pointers and sizes.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dtypes.h"

namespace {

// Tokens in a block of the cache. Must equal KV_BLOCK_SIZE in ops/base.py.
constexpr int BLOCK = 32;
// Outputs of one work item.
constexpr int TILE = 192;

inline void widen(const float* source, float* wide, int64_t count) {
    std::memcpy(wide, source, count * sizeof *wide);
}

inline void widen(const bfloat16* source, float* wide, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        wide[i] = as_float(source[i]);
    }
}

inline void widen(const half* source, float* wide, int64_t count) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= count; i += 8) {
        const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
        _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(eight));
    }
#endif
    for (; i < count; ++i) {
        wide[i] = as_float(source[i]);
    }
}

// Consecutive tokens of one row that share their reads of keys and values. `token` is the first
// one's index in the pass, `length` the number of tokens that it sees, including itself.
struct Tile {
    int32_t token, count, row, length;
};

// Apply the rotary embedding to one head of one token, with the bits of torch's operations: products
// are rounded before they are added. `products` is scratch for 2 * dim numbers.
inline void rotate_as_torch(const T* x, const T* cos, const T* sin, int64_t dim, T* products, T* y) {
    const int64_t half = dim / 2;
    T* const turned = products + dim;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
        store(as_float(x[d]) * as_float(cos[d]), products[d]);
    }
#pragma omp simd
    for (int64_t d = 0; d < half; ++d) {
        store(-as_float(x[d + half]) * as_float(sin[d]), turned[d]);
        store(as_float(x[d]) * as_float(sin[d + half]), turned[d + half]);
    }
    // Otherwise a compiler may fuse a product and the sum in float32.
    asm volatile("" : : "r"(products) : "memory");
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
        store(as_float(products[d]) + as_float(turned[d]), y[d]);
    }
}

// Compute the scores of one query against a block's keys, [dim, BLOCK].
inline void score_block(const float* query, const float* key, int64_t dim, float* scores) {
    float lane[BLOCK] = {};
    for (int64_t d = 0; d < dim; ++d) {
#pragma omp simd
        for (int j = 0; j < BLOCK; ++j) {
            lane[j] += query[d] * key[d * BLOCK + j];
        }
    }
    std::memcpy(scores, lane, sizeof lane);
}

// Add the values [from, to) of a block, [BLOCK, dim], times their weights to a query's sums.
inline void add_values(const float* weights, const float* value, int64_t dim, int64_t from,
                       int64_t to, float* sums) {
    constexpr int64_t WIDE = 64;
    int64_t begin = 0;
    for (; begin + WIDE <= dim; begin += WIDE) {
        float part[WIDE];
        std::memcpy(part, sums + begin, sizeof part);
        for (int64_t j = from; j < to; ++j) {
#pragma omp simd
            for (int64_t d = 0; d < WIDE; ++d) {
                part[d] += weights[j] * value[j * dim + begin + d];
            }
        }
        std::memcpy(sums + begin, part, sizeof part);
    }
    for (int64_t j = from; j < to; ++j) {
        for (int64_t d = begin; d < dim; ++d) {
            sums[d] += weights[j] * value[j * dim + d];
        }
    }
}

// Replace scores [first, end) by their softmax, after the softcap.
inline void softmax(float* scores, int64_t first, int64_t end, float softcap) {
    if (softcap > 0) {
        for (int64_t j = first; j < end; ++j) {
            scores[j] = softcap * std::tanh(scores[j] / softcap);
        }
    }
    float max_value = -INFINITY, total = 0;
#pragma omp simd reduction(max : max_value)
    for (int64_t j = first; j < end; ++j) {
        max_value = scores[j] > max_value ? scores[j] : max_value;
    }
#pragma omp simd reduction(+ : total)
    for (int64_t j = first; j < end; ++j) {
        scores[j] = exp_of_negative(scores[j] - max_value);
        total += scores[j];
    }
    const float scale = 1 / total;
#pragma omp simd
    for (int64_t j = first; j < end; ++j) {
        scores[j] *= scale;
    }
}

// Write source * factor, where the source is dense [layers, rows, columns] and the target may be
// strided or transposed. Return 1 if all results are finite.
template <typename S>
int32_t pack_weights(const S* source, T* target, const int64_t* sizes, const int64_t* strides,
                     float factor) {
    constexpr int64_t AT_ONCE = 4096;
    const int64_t columns = sizes[2], rows_at_once = columns < AT_ONCE ? AT_ONCE / columns : 1;
    std::vector<float> wide(rows_at_once * columns);
    std::vector<T> packed(rows_at_once * columns);
    int32_t overflow = 0;
    for (int64_t block = 0; block < sizes[0]; ++block) {
        for (int64_t begin = 0; begin < sizes[1]; begin += rows_at_once) {
            const int64_t rows = sizes[1] - begin < rows_at_once ? sizes[1] - begin : rows_at_once;
            const int64_t count = rows * columns;
            widen(source + (block * sizes[1] + begin) * columns, wide.data(), count);
#pragma omp simd reduction(| : overflow)
            for (int64_t i = 0; i < count; ++i) {
                const float value = wide[i] * factor;
                overflow |= !(std::fabs(value) <= 3.4028235e38f);
                store(value, packed[i]);
            }
            T* result = target + block * strides[0] + begin * strides[1];
            if (strides[2] == 1) {
                for (int64_t row = 0; row < rows; ++row) {
                    std::memcpy(result + row * strides[1], &packed[row * columns],
                                columns * sizeof(T));
                }
            } else {
                for (int64_t column = 0; column < columns; ++column) {
                    for (int64_t row = 0; row < rows; ++row) {
                        result[row * strides[1] + column * strides[2]] =
                            packed[row * columns + column];
                    }
                }
            }
        }
    }
    return !overflow;
}

}  // namespace

extern "C" {

// y[t] += B[slot[t]]^T (A[slot[t]] x[t]) (LoRA, Hu et al. 2021; one adapter a token as in Punica,
// Chen et al. 2023). Slot 0 adds nothing.
//
// A is [slots, ...][sections * max_rank, inputs], B is [slots, ...][max_rank, outputs]. The outputs
// of a fused projection are adjacent sections. Each section has its own rows of A.
void apply_lora(const T* x, T* y, int64_t tokens, const int32_t* slots, const int32_t* ranks,
                const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t max_rank,
                int64_t inputs, int64_t outputs, const int32_t* section_ends, int64_t sections) {
    int64_t largest_rank = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        largest_rank = ranks[slots[t]] > largest_rank ? ranks[slots[t]] : largest_rank;
    }
    if (largest_rank == 0) {
        return;
    }
    const int64_t rows = sections * largest_rank;
    const int64_t tiles = (outputs + TILE - 1) / TILE;
    std::vector<float> shrunk(tokens * rows);
#pragma omp parallel if (tokens * rows * inputs > WORTH_THREADS)
    {
#pragma omp for schedule(static)
        for (int64_t work = 0; work < tokens * sections; ++work) {
            const int64_t t = work / sections, section = work % sections;
            const T* input = x + t * inputs;
            const T* matrix = a + slots[t] * a_stride + section * max_rank * inputs;
            for (int64_t r = 0; r < ranks[slots[t]]; ++r) {
                const T* row = matrix + r * inputs;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < inputs; ++i) {
                    sum += as_float(row[i]) * as_float(input[i]);
                }
                shrunk[t * rows + section * largest_rank + r] = sum;
            }
        }
#pragma omp for schedule(static)
        for (int64_t work = 0; work < tokens * tiles; ++work) {
            const int64_t t = work / tiles, rank = ranks[slots[t]];
            if (rank == 0) {
                continue;
            }
            int64_t begin = work % tiles * TILE;
            const int64_t tile_end = begin + TILE < outputs ? begin + TILE : outputs;
            const T* matrix = b + slots[t] * b_stride;
            T* output = y + t * outputs;
            for (int64_t section = 0; section < sections && begin < tile_end; ++section) {
                const int64_t end =
                    section_ends[section] < tile_end ? section_ends[section] : tile_end;
                if (end <= begin) {
                    continue;
                }
                const float* h = shrunk.data() + t * rows + section * largest_rank;
                float sums[TILE] = {};
                for (int64_t r = 0; r < rank; ++r) {
                    const T* row = matrix + r * outputs;
                    const float scale = h[r];
#pragma omp simd
                    for (int64_t o = begin; o < end; ++o) {
                        sums[o - begin] += scale * as_float(row[o]);
                    }
                }
#pragma omp simd
                for (int64_t o = begin; o < end; ++o) {
                    store(as_float(output[o]) + sums[o - begin], output[o]);
                }
                begin = end;
            }
        }
    }
}

// Write keys and values of tokens to their slots of the paged cache. Keys are transposed in their
// block, [dim, BLOCK], so that a block's 32 scores are computed in full vectors. Values are [BLOCK,
// dim].
void write_kv(const T* k, const T* v, T* keys, T* values, const int64_t* kv_indices,
              int64_t tokens, int64_t heads, int64_t dim) {
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t block = kv_indices[t] / BLOCK, offset = kv_indices[t] % BLOCK;
        for (int64_t h = 0; h < heads; ++h) {
            const T* key = k + (t * heads + h) * dim;
            T* key_block = keys + (block * heads + h) * dim * BLOCK;
            for (int64_t d = 0; d < dim; ++d) {
                key_block[d * BLOCK + offset] = key[d];
            }
            std::memcpy(values + ((block * heads + h) * BLOCK + offset) * dim,
                        v + (t * heads + h) * dim, dim * sizeof(T));
        }
    }
}

// Rotate queries and keys of tokens (RoFormer, Su et al. 2021, eq. 34), and write keys and values to
// the cache. A row of `qkv` has a token's queries, keys and values.
void rotate_and_write_kv(const T* qkv, int64_t row, const T* cos, const T* sin, T* queries, T* keys,
                         T* values, const int64_t* kv_indices, int64_t tokens, int64_t heads,
                         int64_t kv_heads, int64_t dim) {
    // A token's work is about six operations for each number.
#pragma omp parallel if (6 * tokens * (heads + kv_heads) * dim >= WORTH_THREADS)
    {
        std::vector<T> rotated(kv_heads * dim), products(2 * dim);
#pragma omp for
        for (int64_t t = 0; t < tokens; ++t) {
            const T *q = qkv + t * row, *k = q + heads * dim, *v = k + kv_heads * dim;
            // Each number of a key has its own line of the cache. All are fetched together.
            const int64_t block = kv_indices[t] / BLOCK, offset = kv_indices[t] % BLOCK;
            for (int64_t d = 0; d < kv_heads * dim; ++d) {
                __builtin_prefetch(keys + (block * kv_heads * dim + d) * BLOCK + offset, 1);
            }
            for (int64_t h = 0; h < heads; ++h) {
                rotate_as_torch(q + h * dim, cos + t * dim, sin + t * dim, dim, products.data(),
                                queries + (t * heads + h) * dim);
            }
            for (int64_t h = 0; h < kv_heads; ++h) {
                rotate_as_torch(k + h * dim, cos + t * dim, sin + t * dim, dim, products.data(),
                                &rotated[h * dim]);
            }
            write_kv(rotated.data(), v, keys, values, kv_indices + t, 1, kv_heads, dim);
        }
    }
}

// Causal attention of each tile's tokens over their row's paged cache (PagedAttention, Kwon et al.
// 2023).
//
// Batch invariance: the operations for one token and their order depend on its row alone. They
// depend neither on its tile nor on the batch.
void paged_attention(const T* q, T* out, const T* keys, const T* values, const Tile* tiles,
                     int64_t tile_count, const int32_t* table, int64_t table_stride, int64_t heads,
                     int64_t kv_heads, int64_t dim, float scaling, float softcap, int64_t window) {
    const int64_t group = heads / kv_heads;
#pragma omp parallel
    {
        std::vector<float> scores, query, sums, wide(BLOCK * dim);
#pragma omp for schedule(dynamic)
        for (int64_t work = 0; work < tile_count * kv_heads; ++work) {
            const Tile& tile = tiles[work / kv_heads];
            const int64_t kv = work % kv_heads, queries = tile.count * group;
            const int64_t first = window > 0 && tile.length > window ? tile.length - window : 0;
            const int64_t begin = first / BLOCK,
                          end = (tile.length + tile.count - 1 + BLOCK - 1) / BLOCK;
            const int64_t span = (end - begin) * BLOCK;
            const int32_t* blocks = table + tile.row * table_stride;
            scores.resize(queries * span);
            query.resize(queries * dim);
            sums.assign(queries * dim, 0.0f);
            for (int64_t i = 0; i < queries; ++i) {
                const T* head =
                    q + ((tile.token + i / group) * heads + kv * group + i % group) * dim;
                for (int64_t d = 0; d < dim; ++d) {
                    query[i * dim + d] = as_float(head[d]) * scaling;
                }
            }
            for (int64_t block = begin; block < end; ++block) {
                widen(keys + (blocks[block] * kv_heads + kv) * dim * BLOCK, wide.data(),
                      dim * BLOCK);
                for (int64_t i = 0; i < queries; ++i) {
                    score_block(&query[i * dim], wide.data(), dim,
                                &scores[i * span + (block - begin) * BLOCK]);
                }
            }
            for (int64_t i = 0; i < queries; ++i) {
                const int64_t seen = tile.length + i / group;
                const int64_t from = window > 0 && seen > window ? seen - window : 0;
                softmax(&scores[i * span], from - begin * BLOCK, seen - begin * BLOCK, softcap);
            }
            for (int64_t block = begin; block < end; ++block) {
                widen(values + (blocks[block] * kv_heads + kv) * BLOCK * dim, wide.data(),
                      BLOCK * dim);
                for (int64_t i = 0; i < queries; ++i) {
                    const int64_t seen = tile.length + i / group - block * BLOCK;
                    const int64_t skip = window > 0 ? seen - window : 0;
                    const int64_t from = skip > 0 ? skip : 0, to = seen < BLOCK ? seen : BLOCK;
                    add_values(&scores[i * span + (block - begin) * BLOCK], wide.data(), dim, from,
                               to, &sums[i * dim]);
                }
            }
            for (int64_t i = 0; i < queries; ++i) {
                T* result = out + ((tile.token + i / group) * heads + kv * group + i % group) * dim;
                for (int64_t d = 0; d < dim; ++d) {
                    store(sums[i * dim + d], result[d]);
                }
            }
        }
    }
}

int32_t pack_weights_float32(const float* source, T* target, const int64_t* sizes,
                             const int64_t* strides, float factor) {
    return pack_weights(source, target, sizes, strides, factor);
}

int32_t pack_weights_float16(const half* source, T* target, const int64_t* sizes,
                             const int64_t* strides, float factor) {
    return pack_weights(source, target, sizes, strides, factor);
}

// RMSNorm (Zhang & Sennrich 2019): x / rms(x) * weight over the last dimension, rounded before the
// weight as in models.
void rms_norm(const T* x, const T* weight, T* y, int64_t tokens, int64_t size, float epsilon) {
    for (int64_t t = 0; t < tokens; ++t) {
        const T* row = x + t * size;
        T* result = y + t * size;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; ++i) {
            squares += as_float(row[i]) * as_float(row[i]);
        }
        const float scale = 1 / std::sqrt(squares / size + epsilon);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            T rounded;
            store(as_float(row[i]) * scale, rounded);
            store(as_float(weight[i]) * as_float(rounded), result[i]);
        }
    }
}

// Index of the largest value of each row, the first of equals.
void argmax(const T* x, int64_t* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* values = x + row * size;
        float max_value = -INFINITY;
#pragma omp simd reduction(max : max_value)
        for (int64_t i = 0; i < size; ++i) {
            const float value = as_float(values[i]);
            max_value = value > max_value ? value : max_value;
        }
        out[row] = 0;
        for (int64_t i = 0; i < size; ++i) {
            if (as_float(values[i]) == max_value) {
                out[row] = i;
                break;
            }
        }
    }
}

}  // extern "C"
