// Operations of a decoder layer of the Llama family on a CPU: in float32, attention in bfloat16 too.
//
// Every result is summed in a fixed order, which depends neither on other rows nor on the number of threads.
// So a row has the same bits alone and beside other rows. This file is compiled once per instruction set, and
// functions.py loads the library that the processor can run.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

// A tile is TILE_ROWS rows by two vectors of columns, whose sums fill the registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_ROWS = 12;
#else
constexpr int LANES = 8, TILE_ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;             // columns of a packed weight that are stored together
constexpr int64_t AHEAD = 16 * PANEL;        // numbers of a weight that are prefetched
constexpr int64_t WORTH_A_THREAD = 1 << 15;  // multiplications that make up for starting a thread

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t HalfWords __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

// Number in bfloat16: the upper half of the bits of a float32.
struct BFloat16 {
    uint16_t bits;
};

Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

Vector load(const BFloat16* from) {
    const HalfWords halves = *reinterpret_cast<const HalfWords*>(from);
    return reinterpret_cast<Vector>(__builtin_convertvector(halves, Words) << 16);
}

void store(float* to, Vector vector) { *reinterpret_cast<Vector*>(to) = vector; }

// Rounds to nearest, ties to even.
void store(BFloat16* to, Vector vector) {
    const Words words = reinterpret_cast<Words>(vector);
    const Words rounded = (words + 0x7fff + (words >> 16 & 1)) >> 16;
    const Words some = vector == vector ? rounded : Words{} + 0x7fc0;  // rounding could lose a NaN
    *reinterpret_cast<HalfWords*>(to) = __builtin_convertvector(some, HalfWords);
}

// Loads `count` numbers into a vector, whose other numbers are 0.
Vector load(const float* from, int64_t count) {
    if (count == LANES) return load(from);
    Vector vector = {};
    std::memcpy(&vector, from, count * sizeof(float));
    return vector;
}

void store(float* to, Vector vector, int64_t count) {
    if (count == LANES) store(to, vector);
    else std::memcpy(to, &vector, count * sizeof(float));
}

// Multiplies ROWS rows by a panel. Each sum adds the inputs in their order.
template <int ROWS>
void tile(const float* rows, int64_t inputs, const float* panel, const float* bias, const float* added,
          float* result, int64_t outputs, int64_t columns) {
    Vector sums[ROWS][2] = {};
    for (int64_t input = 0; input < inputs; ++input) {
        const float* weights = panel + input * PANEL;
        __builtin_prefetch(weights + AHEAD);
        __builtin_prefetch(weights + AHEAD + LANES);
        const Vector left = load(weights), right = load(weights + LANES);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const float number = rows[row * inputs + input];
            sums[row][0] += left * number;
            sums[row][1] += right * number;
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int half = 0; half < 2; ++half) {
            const int64_t first = half * LANES, count = std::min<int64_t>(columns - first, LANES);
            if (count <= 0) continue;
            const int64_t place = row * outputs + first;
            Vector sum = sums[row][half];
            if (bias) sum += load(bias + first, count);
            if (added) sum += load(added + place, count);
            store(result + place, sum, count);
        }
    }
}

using Tile = decltype(&tile<1>);

template <int... LESS_ONE>
Tile tile_of(int64_t rows, std::integer_sequence<int, LESS_ONE...>) {
    static constexpr Tile TILES[] = {tile<LESS_ONE + 1>...};
    return TILES[rows - 1];
}

// Returns a vector whose lane i comes from `left` if i & WIDTH is 0, else from `right`. The lane that is read
// there is i with bit WIDTH replaced by BIT.
template <int WIDTH, int BIT, int... LANE>
Vector half_of(Vector left, Vector right, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(left, right, ((LANE & WIDTH ? LANES : 0) + ((LANE & ~WIDTH) | BIT))...);
#else
    const Integers lanes = {((LANE & WIDTH ? LANES : 0) + ((LANE & ~WIDTH) | BIT))...};
    return __builtin_shuffle(left, right, lanes);
#endif
}

// Returns a vector of the sums of LANES vectors. Lanes are added in pairs; `vectors` is overwritten.
template <int WIDTH = LANES / 2>
Vector totals(Vector* vectors) {
    if constexpr (WIDTH == 0) {
        return vectors[0];
    } else {
        constexpr auto LANE = std::make_integer_sequence<int, LANES>();
        for (int one = 0; one < WIDTH; ++one) {
            const Vector left = vectors[one], right = vectors[one + WIDTH];
            vectors[one] = half_of<WIDTH, 0>(left, right, LANE) + half_of<WIDTH, WIDTH>(left, right, LANE);
        }
        return totals<WIDTH / 2>(vectors);
    }
}

float total(Vector vector) {
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += vector[lane];
    return sum;
}

// Splits 0..count among threads, which call function(first, last). Small work stays in the calling thread.
template <typename Function>
void in_parts(int64_t count, int64_t work_of_each, int threads, Function function) {
    const int64_t worth = count * work_of_each / WORTH_A_THREAD;
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>({threads, count, worth}));
    if (parts == 1) return function(int64_t(0), count);
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part) function(count * part / parts, count * (part + 1) / parts);
}

// Returns e^x to two units in the last place, by the method of Cephes (Moshier 1992): x = n ln 2 + r.
Vector exponential(Vector x) {
    x = x < -87.0f ? Vector{} - 87.0f : x;
    x = x > 88.0f ? Vector{} + 88.0f : x;
    const Vector scaled = x * 1.44269504088896341f;
    const Vector half = scaled < 0.0f ? Vector{} - 0.5f : Vector{} + 0.5f;
    const Integers whole = __builtin_convertvector(scaled + half, Integers);
    const Vector n = __builtin_convertvector(whole, Vector);
    const Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vector power = Vector{} + 1.9875691500e-4f;
    for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f})
        power = power * r + factor;
    power = power * r * r + r + 1.0f;
    const Integers exponent = (whole + 127) << 23;
    Vector two_to_n;
    std::memcpy(&two_to_n, &exponent, sizeof(exponent));
    return power * two_to_n;
}

// Consecutive rows of a sequence: an entry of PagedInput's few_tiles or many_tiles.
struct QueryTile {
    int64_t lane, first, rows, end, root;
};

// Input of `attend`. A slot of keys or values is [kv_heads, dim]; PagedInput describes the integers.
template <typename Number>
struct Attention {
    const Number *query, *keys, *values;
    const float* sinks;  // [heads] or nullptr
    const int64_t *block_table, *windowed;  // windowed: block of the layer by entry of the table, or nullptr
    const QueryTile* tiles[2];
    const int64_t *seen, *ancestors, *paths, *positions;
    Number* output;                   // [rows, heads, value_dim]
    int64_t head_stride, row_stride;  // numbers between heads or rows of the query
    int64_t rows, heads, kv_heads, key_dim, value_dim;
    int64_t block_size, blocks, num_tiles[2], words, path_length;
    int64_t window;          // positions; 0: none
    float scaling, softcap;  // softcap 0: none
};

// Finds the slots of all keys that a row sees, in the order of its path, and returns their number. The last
// slot is repeated to fill up a whole vector.
template <typename Number>
int64_t find_slots(const Attention<Number>& of, const QueryTile& tile, int64_t row,
                   std::vector<int64_t>& slots) {
    const int64_t *table = of.block_table + tile.lane * of.blocks, seen = of.seen[row];
    const int64_t in_order = of.path_length ? std::min(seen, tile.root) : seen;
    const int64_t begin = of.window ? std::max<int64_t>(0, of.positions[row] - of.window + 1) : 0;
    const auto block_at = [&](int64_t index) { return of.windowed ? of.windowed[table[index]] : table[index]; };
    const auto add = [&](int64_t place) {
        slots.push_back(block_at(place / of.block_size) * of.block_size + place % of.block_size);
    };
    slots.resize(std::max<int64_t>(0, in_order - begin));
    for (int64_t place = begin; place < in_order;) {
        const int64_t block = place / of.block_size, end = std::min(in_order, (block + 1) * of.block_size);
        const int64_t moved = (block_at(block) - block) * of.block_size;
        for (; place < end; ++place) slots[place - begin] = place + moved;
    }
    for (int64_t place = std::max(begin, in_order); place < seen; ++place)
        add(tile.root + of.paths[row * of.path_length + place - tile.root]);
    for (int64_t word = 0; word < of.words; ++word) {
        for (uint64_t bits = of.ancestors[row * of.words + word]; bits; bits &= bits - 1)
            add(seen + word * 64 + __builtin_ctzll(bits));
    }
    const int64_t count = slots.size();
    slots.resize((count + LANES - 1) / LANES * LANES, slots.back());
    return count;
}

// Returns the dot products of a query with the keys of LANES slots.
template <typename Number>
Vector products(const Attention<Number>& of, const Number* query, const Number* keys, const int64_t* slots) {
    Vector sums[LANES] = {};
    for (int64_t at = 0; at < of.key_dim; at += LANES) {
        const Vector numbers = load(query + at);
        for (int lane = 0; lane < LANES; ++lane)
            sums[lane] += numbers * load(keys + slots[lane] * of.kv_heads * of.key_dim + at);
    }
    return totals(sums);
}

// Replaces scores [count] by their exponentials, relative to the largest score. Returns the sum of these and
// of the sink's exponential. The caller has repeated the last score to fill up a whole vector.
float exponentials(float* scores, int64_t count, const float* sink) {
    Vector most = Vector{} + (sink ? *sink : -INFINITY), sums = {};
    for (int64_t at = 0; at < count; at += LANES) {
        const Vector some = load(scores + at);
        most = some > most ? some : most;
    }
    float largest = most[0];
    for (int lane = 1; lane < LANES; ++lane) largest = std::max(largest, most[lane]);
    for (int64_t at = 0; at < count; at += LANES) {
        Vector some = exponential(load(scores + at) - largest);
        for (int64_t lane = count - at; lane < LANES; ++lane) some[lane] = 0;
        store(scores + at, some);
        sums += some;
    }
    return total(sums) + (sink ? exponential(Vector{} + (*sink - largest))[0] : 0.0f);
}

// Adds the weighted values of slots, VECTORS vectors of each, and divides by `sum`. Four independent sums
// hide the latency of additions.
template <int VECTORS, typename Number>
void add_values(const Attention<Number>& of, const Number* values, const int64_t* slots, int64_t count,
                const float* weights, float sum, Number* output) {
    Vector sums[4][VECTORS] = {};
    const auto add = [&](int part, int64_t at) {
        const Number* value = values + slots[at] * of.kv_heads * of.value_dim;
        for (int vector = 0; vector < VECTORS; ++vector)
            sums[part][vector] += load(value + vector * LANES) * weights[at];
    };
    int64_t at = 0;
    for (; at + 4 <= count; at += 4) {
        add(0, at), add(1, at + 1), add(2, at + 2), add(3, at + 3);
    }
    for (int part = 0; at + part < count; ++part) add(part, at + part);
    for (int vector = 0; vector < VECTORS; ++vector) {
        const Vector all = (sums[0][vector] + sums[1][vector]) + (sums[2][vector] + sums[3][vector]);
        store(output + vector * LANES, all / sum);
    }
}

// Computes a row's query heads that share a key/value head. slots and scores are filled to whole vectors.
template <typename Number>
void attend_row(const Attention<Number>& of, int64_t row, int64_t kv_head, const int64_t* slots,
                int64_t count, float* scores) {
    const int64_t repeats = of.heads / of.kv_heads, filled = (count + LANES - 1) / LANES * LANES;
    const Number *keys = of.keys + kv_head * of.key_dim, *values = of.values + kv_head * of.value_dim;
    for (int64_t head = kv_head * repeats; head < (kv_head + 1) * repeats; ++head) {
        const Number* query = of.query + head * of.head_stride + row * of.row_stride;
        for (int64_t at = 0; at < filled; at += LANES)
            store(scores + at, products(of, query, keys, slots + at) * of.scaling);
        for (int64_t at = 0; of.softcap && at < filled; ++at)
            scores[at] = std::tanh(scores[at] / of.softcap) * of.softcap;
        const float sum = exponentials(scores, count, of.sinks ? of.sinks + head : nullptr);
        Number* output = of.output + (row * of.heads + head) * of.value_dim;
        int64_t first = 0;
        for (; first + 2 * LANES <= of.value_dim; first += 2 * LANES)
            add_values<2>(of, values + first, slots, count, scores, sum, output + first);
        if (first < of.value_dim)
            add_values<1>(of, values + first, slots, count, scores, sum, output + first);
    }
}

// Computes attention of every row over the keys and values of its path. Rows in no tile are padding; their
// output is 0.
template <typename Number>
void attend(const Attention<Number>& of, int threads) {
    std::vector<const QueryTile*> tiles(of.rows);
    int64_t seen = 0;
    for (int kind = 0; kind < 2; ++kind) {
        for (int64_t number = 0; number < of.num_tiles[kind]; ++number) {
            const QueryTile& tile = of.tiles[kind][number];
            std::fill_n(tiles.begin() + tile.first, tile.rows, &tile);
        }
    }
    for (int64_t row = 0; row < of.rows; ++row) seen += of.seen[row];
    const int64_t repeats = of.heads / of.kv_heads;
    const int64_t each = (seen + of.rows) / of.rows * (of.key_dim + of.value_dim) * repeats;
    in_parts(of.rows * of.kv_heads, each, threads, [&](int64_t first, int64_t last) {
        std::vector<int64_t> slots;
        std::vector<float> scores;
        // Head by head, so that a head's keys stay in the CPU's cache.
        for (int64_t number = first; number < last; ++number) {
            const int64_t kv_head = number / of.rows, row = number % of.rows;
            if (!tiles[row]) {
                const int64_t size = repeats * of.value_dim;
                std::memset(of.output + (row * of.kv_heads + kv_head) * size, 0, size * sizeof(Number));
                continue;
            }
            const int64_t count = find_slots(of, *tiles[row], row, slots);
            scores.resize(slots.size());
            attend_row(of, row, kv_head, slots.data(), count, scores.data());
        }
    });
}

}  // namespace

extern "C" {

// Returns the columns of a panel. A packed weight is [ceil(outputs / width), inputs, width], with padding 0.
int64_t panel_width() { return PANEL; }

// Multiplies rows [num_rows, inputs] by a packed weight; adds bias [outputs] and added [num_rows, outputs],
// each of which may be nullptr. result [num_rows, outputs] may share the memory of `added`.
void multiply(const float* rows, int64_t num_rows, const float* packed, int64_t inputs, int64_t outputs,
              const float* bias, const float* added, float* result, int threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL, tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    in_parts(panels, num_rows * inputs * PANEL, threads, [=](int64_t first, int64_t last) {
        for (int64_t panel = first; panel < last; ++panel) {
            const int64_t column = panel * PANEL, columns = std::min<int64_t>(PANEL, outputs - column);
            for (int64_t number = 0; number < tiles; ++number) {
                const int64_t row = num_rows * number / tiles, end = num_rows * (number + 1) / tiles;
                const Tile compute = tile_of(end - row, std::make_integer_sequence<int, TILE_ROWS>());
                const int64_t place = row * outputs + column;
                compute(rows + row * inputs, inputs, packed + column * inputs, bias ? bias + column : nullptr,
                        added ? added + place : nullptr, result + place, outputs, columns);
            }
        }
    });
}

// Computes RMS norms of rows [num_rows, groups, size], `stride` numbers apart, with weight [groups, size].
// result [num_rows, groups, size], `result_stride` numbers apart, may share the memory of `rows`.
void norm(const float* rows, int64_t num_rows, int64_t groups, int64_t size, int64_t stride,
          const float* weight, float epsilon, float* result, int64_t result_stride, int threads) {
    in_parts(num_rows, groups * size * 4, threads, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            for (int64_t group = 0; group < groups; ++group) {
                const float* numbers = rows + row * stride + group * size;
                const float* scales = weight + group * size;
                float* to = result + row * result_stride + group * size;
                Vector squares = {};
                for (int64_t at = 0; at < size; at += LANES) {
                    const Vector some = load(numbers + at, std::min<int64_t>(LANES, size - at));
                    squares += some * some;
                }
                const float factor = 1.0f / std::sqrt(total(squares) / size + epsilon);
                for (int64_t at = 0; at < size; at += LANES) {
                    const int64_t count = std::min<int64_t>(LANES, size - at);
                    store(to + at, load(numbers + at, count) * factor * load(scales + at, count), count);
                }
            }
        }
    });
}

// Rotates queries and keys by their positions, and stores keys and values in the cache.
//
// product [num_tokens, heads + 2 * kv_heads, dim]; cosines and sines [num_tokens, dim], the first half of the
// sines negated; slots [num_tokens], nullptr if they are consecutive from `first_slot` on. query [num_tokens,
// heads, dim], keys and values [slots, kv_heads, dim].
void rotate_and_store(const float* product, int64_t num_tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                      const float* cosines, const float* sines, const int64_t* slots, int64_t first_slot,
                      float* query, float* keys, float* values, int threads) {
    const int64_t all = heads + 2 * kv_heads, half = dim / 2;
    in_parts(num_tokens, all * dim * 4, threads, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; ++token) {
            const int64_t slot = slots ? slots[token] : first_slot + token;
            const float *cosine = cosines + token * dim, *sine = sines + token * dim;
            for (int64_t head = 0; head < heads + kv_heads; ++head) {
                const float* from = product + (token * all + head) * dim;
                float* to = head < heads ? query + (token * heads + head) * dim
                                         : keys + (slot * kv_heads + head - heads) * dim;
                for (int64_t at = 0; at < half; ++at) {
                    to[at] = from[at] * cosine[at] + from[at + half] * sine[at];
                    to[at + half] = from[at + half] * cosine[at + half] + from[at] * sine[at + half];
                }
            }
            const float* value = product + (token * all + heads + kv_heads) * dim;
            std::memcpy(values + slot * kv_heads * dim, value, kv_heads * dim * sizeof(float));
        }
    });
}

// Writes silu(gate) * up to result [num_tokens, size]; gate_up [num_tokens, 2 * size] has both side by side.
void gate(const float* gate_up, int64_t num_tokens, int64_t size, float* result, int threads) {
    in_parts(num_tokens, size * 16, threads, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; ++token) {
            const float *gates = gate_up + token * 2 * size, *ups = gates + size;
            for (int64_t at = 0; at < size; at += LANES) {
                const int64_t count = std::min<int64_t>(LANES, size - at);
                const Vector opened = load(gates + at, count);
                store(result + token * size + at,
                      opened / (1.0f + exponential(-opened)) * load(ups + at, count), count);
            }
        }
    });
}

void attend_float32(const Attention<float>* of, int threads) { attend(*of, threads); }

void attend_bfloat16(const Attention<BFloat16>* of, int threads) { attend(*of, threads); }

}  // extern "C"
