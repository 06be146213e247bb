// Unpack the blocks of GGUF files.
//
// A value is the one that llama.cpp dequantises to in float32, rounded once to the dtype. Each block
// is unpacked on its own, so the result does not depend on the number of threads. The caller checks
// pointers and sizes. The layouts are those of ggml-common.h.

#include <cstdint>
#include <cstring>

#include "dtypes.h"

namespace {

inline uint16_t load16(const uint8_t* data) {
    uint16_t value;
    std::memcpy(&value, data, sizeof value);
    return value;
}

inline float half_at(const uint8_t* data) { return as_float(half{load16(data)}); }

// Sixteen numbers at a time. Compilers do not find this form in loops over bytes.
constexpr int64_t LANES = 16, PARTS = LANES / VECTOR;
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t ByteVector __attribute__((vector_size(VECTOR)));
typedef uint16_t ShortVector __attribute__((vector_size(VECTOR * 2)));
typedef uint32_t BitVector __attribute__((vector_size(VECTOR * 4)));
typedef int32_t IntegerVector __attribute__((vector_size(VECTOR * 4)));

struct Floats {
    Vector parts[PARTS];
};

template <typename Operation>
inline Floats each(Floats values, Operation operation) {
    for (int64_t part = 0; part < PARTS; ++part) {
        values.parts[part] = operation(values.parts[part]);
    }
    return values;
}

inline Floats operator+(const Floats& x, float y) {
    return each(x, [y](Vector part) { return part + y; });
}

inline Floats operator-(const Floats& x, float y) {
    return each(x, [y](Vector part) { return part - y; });
}

inline Floats operator*(const Floats& x, float y) {
    return each(x, [y](Vector part) { return part * y; });
}

inline Bytes load_bytes(const uint8_t* x) {
    Bytes values;
    std::memcpy(&values, x, sizeof values);
    return values;
}

inline Floats to_floats(Bytes values) {
    Floats floats;
    for (int64_t part = 0; part < PARTS; ++part) {
        ByteVector bytes;
        std::memcpy(&bytes, reinterpret_cast<const uint8_t*>(&values) + part * VECTOR,
                    sizeof bytes);
        floats.parts[part] =
            __builtin_convertvector(__builtin_convertvector(bytes, IntegerVector), Vector);
    }
    return floats;
}

inline void store_floats(const Floats& values, float* y) {
    std::memcpy(y, &values, sizeof values);
}

inline void store_floats(const Floats& values, bfloat16* y) {
    for (int64_t part = 0; part < PARTS; ++part) {
        BitVector bits;
        std::memcpy(&bits, &values.parts[part], sizeof bits);
        const ShortVector rounded =
            __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, ShortVector);
        std::memcpy(y + part * VECTOR, &rounded, sizeof rounded);
    }
}

// Sixteen bits as numbers 0 or 16, the lowest bit first.
inline Bytes fifth_bits(uint32_t bits) {
    const Bytes which = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8_t low = bits & 255, high = bits >> 8 & 255;
    const Bytes spread = {low,  low,  low,  low,  low,  low,  low,  low,
                          high, high, high, high, high, high, high, high};
    const Bytes set = (spread & which) != 0;
    return set & 16;
}

// Each layout has a block's numbers and bytes, and unpacks one block.

struct F32 {
    static constexpr int64_t ELEMENTS = 1, BYTES = 4;
    static void unpack(const uint8_t* x, T* y) {
        float value;
        std::memcpy(&value, x, sizeof value);
        store(value, y[0]);
    }
};

struct F16 {
    static constexpr int64_t ELEMENTS = 1, BYTES = 2;
    static void unpack(const uint8_t* x, T* y) { store(half_at(x), y[0]); }
};

struct BF16 {
    static constexpr int64_t ELEMENTS = 1, BYTES = 2;
    static void unpack(const uint8_t* x, T* y) {
        store(as_float(bfloat16{load16(x)}), y[0]);
    }
};

// A number times a scale is exact below, so a fused multiply-add gives the same sums.

// The numbers of a block with 32, of four bits each, or of five: the fifth ones are before the others.
template <bool FIVE>
struct Halves {
    Bytes low, high;

    explicit Halves(const uint8_t* x) {
        const Bytes q = load_bytes(x + (FIVE ? 4 : 0));
        low = q & 15;
        high = q >> 4;
        if constexpr (FIVE) {
            low |= fifth_bits(load16(x));
            high |= fifth_bits(load16(x + 2));
        }
    }
};

template <bool FIVE>
struct Centred {
    static constexpr int64_t ELEMENTS = 32, BYTES = FIVE ? 22 : 18;
    static void unpack(const uint8_t* x, T* y) {
        const float d = half_at(x), middle = FIVE ? 16.0f : 8.0f;
        const Halves<FIVE> q(x + 2);
        store_floats((to_floats(q.low) - middle) * d, y);
        store_floats((to_floats(q.high) - middle) * d, y + LANES);
    }
};
using Q4_0 = Centred<false>;
using Q5_0 = Centred<true>;

template <bool FIVE>
struct WithMinimum {
    static constexpr int64_t ELEMENTS = 32, BYTES = FIVE ? 24 : 20;
    static void unpack(const uint8_t* x, T* y) {
        const float d = half_at(x), m = half_at(x + 2);
        const Halves<FIVE> q(x + 4);
        store_floats(to_floats(q.low) * d + m, y);
        store_floats(to_floats(q.high) * d + m, y + LANES);
    }
};
using Q4_1 = WithMinimum<false>;
using Q5_1 = WithMinimum<true>;

struct Q8_0 {
    static constexpr int64_t ELEMENTS = 32, BYTES = 34;
    static void unpack(const uint8_t* x, T* y) {
        const float d = half_at(x);
        const int8_t* q = reinterpret_cast<const int8_t*>(x + 2);
#pragma omp simd
        for (int j = 0; j < 32; ++j) {
            store(static_cast<float>(q[j]) * d, y[j]);
        }
    }
};

// Scale and minimum of each 32 numbers of a block with 256, six bits each.
inline void scale_and_min(int j, const uint8_t* q, uint8_t& scale, uint8_t& min) {
    if (j < 4) {
        scale = q[j] & 63;
        min = q[j + 4] & 63;
    } else {
        scale = (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4);
        min = (q[j + 4] >> 4) | ((q[j] >> 6) << 4);
    }
}

template <bool FIVE>
struct Superblock {
    static constexpr int64_t ELEMENTS = 256, BYTES = FIVE ? 176 : 144;
    static void unpack(const uint8_t* x, T* y) {
        const float d = half_at(x), dmin = half_at(x + 2);
        for (int group = 0; group < 8; ++group, y += 32) {
            uint8_t scale, min;
            scale_and_min(group, x + 4, scale, min);
            const float d1 = d * scale, m1 = dmin * min;
            for (int part = 0; part < 2; ++part) {
                const Bytes q = load_bytes(x + BYTES - 128 + group / 2 * 32 + part * LANES);
                Bytes number = group % 2 ? q >> 4 : q & 15;
                if constexpr (FIVE) {
                    number |= (load_bytes(x + 16 + part * LANES) >> group & 1) << 4;
                }
                store_floats(to_floats(number) * d1 - m1, y + part * LANES);
            }
        }
    }
};
using Q4_K = Superblock<false>;
using Q5_K = Superblock<true>;

struct Q6_K {
    static constexpr int64_t ELEMENTS = 256, BYTES = 210;
    static void unpack(const uint8_t* x, T* y) {
        const int8_t* scales = reinterpret_cast<const int8_t*>(x + 192);
        const float d = half_at(x + 208);
        for (int group = 0; group < 16; ++group, y += LANES) {
            // Two halves of four quarters of two parts.
            const int half_block = group / 8, quarter = group / 2 % 4, part = group % 2;
            const Bytes q =
                load_bytes(x + half_block * 64 + quarter % 2 * 32 + part * LANES);
            const Bytes high =
                load_bytes(x + 128 + half_block * 32 + part * LANES) >> 2 * quarter & 3;
            const Bytes low = quarter < 2 ? q & 15 : q >> 4;
            store_floats((to_floats(low | high << 4) - 32.0f) * (d * scales[group]), y);
        }
    }
};

// The row of the file with this row of transformers. llama.cpp rotates the pairs of a head of
// `head` rows, transformers its halves. 0: the rows are in the same order.
inline int64_t stored_row(int64_t row, int64_t head) {
    if (head == 0) {
        return row;
    }
    const int64_t inside = row % head, half_head = head / 2;
    return row - inside + inside % half_head * 2 + inside / half_head;
}

template <typename Layout>
void unpack_rows(const uint8_t* data, int64_t row_bytes, int64_t first_row, int64_t rows,
                 int64_t first_block, int64_t blocks, int64_t head, T* out, int64_t out_row) {
#pragma omp parallel for schedule(static) if (rows * blocks * Layout::ELEMENTS > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const uint8_t* x = data + stored_row(first_row + row, head) * row_bytes +
                           first_block * Layout::BYTES;
        T* y = out + row * out_row;
        for (int64_t block = 0; block < blocks; ++block) {
            Layout::unpack(x + block * Layout::BYTES, y + block * Layout::ELEMENTS);
        }
    }
}

}  // namespace

extern "C" {

// Unpack `blocks` blocks from `first_block` on of each of `rows` rows. Returns 0 for a format that
// is unknown. The formats are GGML's numbers.
int32_t unpack_blocks(int64_t format, const uint8_t* data, int64_t row_bytes, int64_t first_row,
                      int64_t rows, int64_t first_block, int64_t blocks, int64_t head, T* out,
                      int64_t out_row) {
#define UNPACK(NUMBER, LAYOUT)                                                                  \
    case NUMBER:                                                                                \
        unpack_rows<LAYOUT>(data, row_bytes, first_row, rows, first_block, blocks, head, out,   \
                            out_row);                                                           \
        return 1
    switch (format) {
        UNPACK(0, F32);
        UNPACK(1, F16);
        UNPACK(2, Q4_0);
        UNPACK(3, Q4_1);
        UNPACK(6, Q5_0);
        UNPACK(7, Q5_1);
        UNPACK(8, Q8_0);
        UNPACK(12, Q4_K);
        UNPACK(13, Q5_K);
        UNPACK(14, Q6_K);
        UNPACK(30, BF16);
    }
#undef UNPACK
    return 0;
}

}  // extern "C"
