// Products of bfloat16 matrices with AMX, whose rows have the same bits in any batch.
//
// Each sum runs over the inputs in one order, in float32, and is rounded once to nearest even. Neither
// the number of rows nor the number of threads changes that order. The caller checks pointers and
// sizes.

#include <cstdint>
#include <type_traits>

#include "dtypes.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define WITH_AMX
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#endif

namespace {

#ifdef WITH_AMX

// A tile has 16 rows of 64 bytes: 16 sums, or 32 inputs. A block has two tiles of rows and a panel of
// two tiles of outputs, so each loaded tile is used twice.
constexpr int64_t ROWS = 16, INPUTS = 32, PANEL = 32, BLOCK = 2 * ROWS;
constexpr int64_t TILE = ROWS * INPUTS;
// Tiles of inputs that a thread reads of its rows at a time, and the numbers that this may be: a
// megabyte, half of a core's cache.
constexpr int64_t OUTER_STEPS = 48, MOST_NUMBERS = 1 << 19, MOST_ROWS = 512;
// Tiles of inputs of a block and of a panel that stay in a core's first cache together: 40 KiB.
constexpr int64_t INNER_STEPS = 10;
// Panels whose sums a thread keeps.
constexpr int64_t MOST_PANELS = 16;

alignas(64) thread_local float kept_sums[MOST_PANELS * MOST_ROWS * PANEL];

inline int64_t divide_up(int64_t size, int64_t part) { return (size + part - 1) / part; }

// Set the tiles' rows. 0 to 3 have sums, 4 and 5 the block's inputs, 6 and 7 the panel's weights.
class Tiles {
   public:
    ~Tiles() { _tile_release(); }

    void set_rows(int64_t rows) {
        if (rows == rows_) {
            return;
        }
        rows_ = rows;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        const int64_t first = std::min(rows, ROWS), second = std::max(rows - ROWS, int64_t{1});
        const int64_t each[8] = {first, first, second, second, first, second, ROWS, ROWS};
        for (int tile = 0; tile < 8; ++tile) {
            config.bytes[tile] = 64;
            config.rows[tile] = static_cast<uint8_t>(each[tile]);
        }
        _tile_loadconfig(&config);
    }

   private:
    int64_t rows_ = 0;
};

// sums[BLOCK][PANEL] of one or two tiles of rows, continued unless `begins`.
template <bool TWO>
inline void multiply_block(const T* x, int64_t x_row, const T* panel, int64_t steps, bool begins,
                           float* sums) {
    constexpr int64_t stride = PANEL * sizeof(float);
    float* const second = sums + ROWS * PANEL;
    if (begins) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + 16, stride);
        if (TWO) {
            _tile_loadd(2, second, stride);
            _tile_loadd(3, second + 16, stride);
        }
    }
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(4, x + step * INPUTS, x_row * sizeof(T));
        _tile_loadd(6, panel + step * 2 * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + step * 2 * TILE + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, x + ROWS * x_row + step * INPUTS, x_row * sizeof(T));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + 16, stride);
    if (TWO) {
        _tile_stored(2, second, stride);
        _tile_stored(3, second + 16, stride);
    }
}

// Add the bias, if any, and round.
inline void store_block(const float* sums, const T* bias, int64_t rows, int64_t columns, T* out,
                        int64_t out_row) {
    const uint32_t mask = columns < PANEL ? (1u << columns) - 1 : ~0u;
    alignas(64) float added[PANEL] = {};
    for (int64_t column = 0; bias && column < columns; ++column) {
        added[column] = as_float(bias[column]);
    }
    const __m512 first = _mm512_load_ps(added), second = _mm512_load_ps(added + VECTOR);
    for (int64_t row = 0; row < rows; ++row, sums += PANEL, out += out_row) {
        const __m512 one = _mm512_add_ps(_mm512_load_ps(sums), first);
        const __m512 two = _mm512_add_ps(_mm512_load_ps(sums + VECTOR), second);
        _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(two, one));
    }
}

// Pack the weights of a tile. Those of one output, or of one input, are `stride` apart from those of
// the next.
template <bool INPUTS_CONTIGUOUS>
inline void pack_tile(const T* from, int64_t stride, int64_t outputs, T* to) {
    const __mmask16 mask = static_cast<__mmask16>((1u << outputs) - 1);
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(stride));
    for (int64_t pair = 0; pair < INPUTS / 2; ++pair, to += 2 * ROWS) {
        __m512i pairs;
        if (INPUTS_CONTIGUOUS) {
            pairs = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, places,
                                                from + 2 * pair, sizeof(T));
        } else {
            const T* const one = from + 2 * pair * stride;
            const __m256i low = _mm256_maskz_loadu_epi16(mask, one),
                          high = _mm256_maskz_loadu_epi16(mask, one + stride);
            pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                    _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        }
        _mm512_storeu_si512(to, pairs);
    }
}

void multiply(const T* x, int64_t x_row, const T* packed, const T* bias, T* out, int64_t out_row,
              int64_t rows, int64_t inputs, int64_t outputs) {
    const int64_t steps = inputs / INPUTS, panels = divide_up(outputs, PANEL);
    const int64_t fitting = MOST_NUMBERS / (std::min(steps, OUTER_STEPS) * INPUTS) / BLOCK * BLOCK;
    const int64_t chunk = std::min(fitting, MOST_ROWS), chunks = divide_up(rows, chunk);
    const int64_t inner = rows > BLOCK ? INNER_STEPS : OUTER_STEPS;
#pragma omp parallel if (rows * inputs * outputs >= WORTH_THREADS)
    {
        Tiles tiles;
        const int64_t threads = omp_get_num_threads();
        // As many panels for each thread.
        const int64_t turns = divide_up(panels, threads * MOST_PANELS);
        const int64_t group = divide_up(panels, threads * turns), groups = divide_up(panels, group);
        // A panel's sums are needed until its last input only.
        const int64_t sums_of_panel = steps > OUTER_STEPS ? chunk * PANEL : 0;
#pragma omp for schedule(static)
        for (int64_t work = 0; work < chunks * groups; ++work) {
            const int64_t first = work / groups * chunk, last = std::min(first + chunk, rows);
            const int64_t begin = work % groups * group, end = std::min(begin + group, panels);
            for (int64_t outer = 0; outer < steps; outer += OUTER_STEPS) {
                const int64_t outer_end = std::min(outer + OUTER_STEPS, steps);
                for (int64_t panel = begin; panel < end; ++panel) {
                    float* const own = kept_sums + (panel - begin) * sums_of_panel;
                    const int64_t column = panel * PANEL;
                    for (int64_t step = outer; step < outer_end; step += inner) {
                        const int64_t count = std::min(inner, outer_end - step);
                        for (int64_t row = first; row < last; row += BLOCK) {
                            const int64_t left = std::min(last - row, BLOCK);
                            const T* const inputs_of_block = x + row * x_row + step * INPUTS;
                            const T* const weights = packed + (panel * steps + step) * 2 * TILE;
                            float* const block = own + (row - first) * PANEL;
                            tiles.set_rows(left);
                            if (left > ROWS) {
                                multiply_block<true>(inputs_of_block, x_row, weights, count,
                                                     step == 0, block);
                            } else {
                                multiply_block<false>(inputs_of_block, x_row, weights, count,
                                                      step == 0, block);
                            }
                            if (step + count == steps) {
                                store_block(block, bias ? bias + column : nullptr, left,
                                            std::min(outputs - column, PANEL),
                                            out + row * out_row + column, out_row);
                            }
                        }
                    }
                }
            }
        }
    }
}

#endif

}  // namespace

extern "C" {

// Whether `matmul` computes here. The call asks the operating system for the right to use tiles, for
// all threads of the process.
int32_t supports_matmul() {
#ifdef WITH_AMX
    constexpr int request = 0x1023, tile_data = 18;
    return std::is_same<T, bfloat16>::value && syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return 0;
#endif
}

// out[rows, outputs] = x[rows, inputs] W^T + bias. `inputs` is a multiple of 32. `pack_tiles` made
// `packed`.
void matmul(const T* x, int64_t x_row, const T* packed, const T* bias, T* out, int64_t out_row,
            int64_t rows, int64_t inputs, int64_t outputs) {
#ifdef WITH_AMX
    multiply(x, x_row, packed, bias, out, out_row, rows, inputs, outputs);
#endif
}

// Pack W for `matmul`: [panels][inputs / 32][2][16 pairs of inputs][16 outputs][2], with zeros beyond
// the last output. W[output][input] is weights[output * output_step + input * input_step], and one of
// the steps is 1.
void pack_tiles(const T* weights, int64_t output_step, int64_t input_step, T* packed,
                int64_t inputs, int64_t outputs) {
#ifdef WITH_AMX
    const int64_t steps = inputs / INPUTS, panels = divide_up(outputs, PANEL);
#pragma omp parallel for schedule(static) if (inputs * outputs >= WORTH_THREADS)
    for (int64_t tile = 0; tile < panels * steps * 2; ++tile) {
        const int64_t step = tile / 2 % steps, first = tile / 2 / steps * PANEL + tile % 2 * ROWS;
        const int64_t count = std::max(std::min(outputs - first, ROWS), int64_t{0});
        const T* const from = weights + first * output_step + step * INPUTS * input_step;
        T* const to = packed + tile * TILE;
        if (input_step == 1) {
            pack_tile<true>(from, output_step, count, to);
        } else {
            pack_tile<false>(from, input_step, count, to);
        }
    }
#endif
}

}  // extern "C"
