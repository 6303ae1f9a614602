// What a decoder layer of the Llama family computes on a CPU, in float32.
//
// Every result is summed in one order, whatever else is computed beside it and by however many threads, so a
// row is the same bit for bit alone and in company. functions.py loads what is built of this file, once for
// every instruction set.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

// Rows of a tile by two vectors of columns are as many sums as there are registers for.
#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_ROWS = 12;
#else
constexpr int LANES = 8, TILE_ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;             // columns that lie together in a packed weight
constexpr int64_t AHEAD = 16 * PANEL;        // numbers of a weight asked for before they are needed
constexpr int64_t WORTH_A_THREAD = 1 << 15;  // multiplications below which starting threads takes longer

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

// A vector of which there may be only `count` numbers; the others are 0 and are not stored.
Vector load(const float* from, int64_t count) {
    if (count == LANES) return load(from);
    Vector vector = {};
    std::memcpy(&vector, from, count * sizeof(float));
    return vector;
}

void store(float* to, Vector vector, int64_t count) {
    if (count == LANES) *reinterpret_cast<Vector*>(to) = vector;
    else std::memcpy(to, &vector, count * sizeof(float));
}

// ROWS rows by one panel: each sum runs over the inputs in their order.
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

// Lanes of `left` where bit WIDTH of the lane is 0, else of `right`: those with the bit taken as BIT.
template <int WIDTH, int BIT, int... LANE>
Vector half_of(Vector left, Vector right, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(left, right, ((LANE & WIDTH ? LANES : 0) + ((LANE & ~WIDTH) | BIT))...);
#else
    const Integers lanes = {((LANE & WIDTH ? LANES : 0) + ((LANE & ~WIDTH) | BIT))...};
    return __builtin_shuffle(left, right, lanes);
#endif
}

// The sums of LANES vectors, each as a tree, as one vector.
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

// Calls function(first, last) for the parts of 0..count of every thread; one thread where the work is small.
template <typename Function>
void in_parts(int64_t count, int64_t work_of_each, int threads, Function function) {
    const int64_t worth = count * work_of_each / WORTH_A_THREAD;
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>({threads, count, worth}));
    if (parts == 1) return function(int64_t(0), count);
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part) function(count * part / parts, count * (part + 1) / parts);
}

// e^x, to two units in the last place, as Cephes computes it (Moshier 1992): x = n ln 2 + r.
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

// What `attend` takes. Rows of a layer's keys and values are [kv_heads, dim]; PagedInput has the rest.
struct Attention {
    const float *query, *keys, *values, *sinks;  // sinks [heads] or nullptr
    const int64_t *block_table, *tiles[2], *seen, *ancestors, *positions;
    float* output;                    // [rows, heads, value_dim]
    int64_t head_stride, row_stride;  // of query, in numbers
    int64_t rows, heads, kv_heads, key_dim, value_dim;
    int64_t block_size, blocks, num_tiles[2], tile_fields, words;
    int64_t window;          // 0: none
    float scaling, softcap;  // 0: none
};

// Where the keys lie that a row sees, in the order of its path, and how many they are. The last is repeated
// to the end of its vector.
int64_t find_slots(const Attention& of, int64_t lane, int64_t row, std::vector<int64_t>& slots) {
    const int64_t *table = of.block_table + lane * of.blocks, seen = of.seen[row];
    const int64_t begin = of.window ? std::max<int64_t>(0, of.positions[row] - of.window + 1) : 0;
    slots.resize(seen - begin);
    for (int64_t place = begin; place < seen;) {
        const int64_t block = place / of.block_size, end = std::min(seen, (block + 1) * of.block_size);
        const int64_t moved = (table[block] - block) * of.block_size;
        for (; place < end; ++place) slots[place - begin] = place + moved;
    }
    for (int64_t word = 0; word < of.words; ++word) {
        for (uint64_t bits = of.ancestors[row * of.words + word]; bits; bits &= bits - 1) {
            const int64_t place = seen + word * 64 + __builtin_ctzll(bits);
            slots.push_back(table[place / of.block_size] * of.block_size + place % of.block_size);
        }
    }
    const int64_t count = slots.size();
    slots.resize((count + LANES - 1) / LANES * LANES, slots.back());
    return count;
}

// Products of a query with the keys of LANES slots.
Vector products(const Attention& of, const float* query, const float* keys, const int64_t* slots) {
    Vector sums[LANES] = {};
    for (int64_t at = 0; at < of.key_dim; at += LANES) {
        const Vector numbers = load(query + at);
        for (int lane = 0; lane < LANES; ++lane)
            sums[lane] += numbers * load(keys + slots[lane] * of.kv_heads * of.key_dim + at);
    }
    return totals(sums);
}

// Softmax of scores [count], and of a sink's, not yet divided by their sum, which is returned. The last score
// is repeated to the end of its vector.
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
        store(scores + at, some, LANES);
        sums += some;
    }
    return total(sums) + (sink ? exponential(Vector{} + (*sink - largest))[0] : 0.0f);
}

// The values of some slots, weighted: VECTORS vectors of each. Four sums go side by side.
template <int VECTORS>
void add_values(const Attention& of, const float* values, const int64_t* slots, int64_t count,
                const float* weights, float sum, float* output) {
    Vector sums[4][VECTORS] = {};
    const auto add = [&](int part, int64_t at) {
        const float* value = values + slots[at] * of.kv_heads * of.value_dim;
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
        store(output + vector * LANES, all / sum, LANES);
    }
}

// One row's query heads of one key and value head. slots and scores have room for whole vectors.
void attend_row(const Attention& of, int64_t row, int64_t kv_head, const int64_t* slots, int64_t count,
                float* scores) {
    const int64_t repeats = of.heads / of.kv_heads, filled = (count + LANES - 1) / LANES * LANES;
    const float *keys = of.keys + kv_head * of.key_dim, *values = of.values + kv_head * of.value_dim;
    for (int64_t head = kv_head * repeats; head < (kv_head + 1) * repeats; ++head) {
        const float* query = of.query + head * of.head_stride + row * of.row_stride;
        for (int64_t at = 0; at < filled; at += LANES)
            store(scores + at, products(of, query, keys, slots + at) * of.scaling, LANES);
        for (int64_t at = 0; of.softcap && at < filled; ++at)
            scores[at] = std::tanh(scores[at] / of.softcap) * of.softcap;
        const float sum = exponentials(scores, count, of.sinks ? of.sinks + head : nullptr);
        float* output = of.output + (row * of.heads + head) * of.value_dim;
        int64_t first = 0;
        for (; first + 2 * LANES <= of.value_dim; first += 2 * LANES)
            add_values<2>(of, values + first, slots, count, scores, sum, output + first);
        if (first < of.value_dim)
            add_values<1>(of, values + first, slots, count, scores, sum, output + first);
    }
}

}  // namespace

extern "C" {

// Columns that a packed weight keeps together: [ceil(outputs / width), inputs, width], filled up with zeros.
int64_t panel_width() { return PANEL; }

// rows [num_rows, inputs] by a packed weight, plus bias [outputs] and added [num_rows, outputs] where they
// are given: result [num_rows, outputs], which may be `added`.
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

// Root mean square norm of rows [num_rows, groups, size], `stride` numbers apart, with weight
// [groups, size]: result [num_rows, groups, size], `result_stride` apart, which may be `rows`.
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

// Rotary embedding of queries and keys, and keys and values into the cache.
//
// product [num_tokens, heads + 2 * kv_heads, dim], cosines and sines [num_tokens, dim], the first half of
// the sines with its sign turned; slots [num_tokens], or nullptr where they follow one another from
// `first_slot`. query [num_tokens, heads, dim], keys and values [slots, kv_heads, dim].
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

// silu(gate) * up of gate_up [num_tokens, 2 * size]: result [num_tokens, size].
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

// Attention of every row to what its path holds in the cache.
void attend(const Attention* given, int threads) {
    const Attention& of = *given;
    std::vector<int64_t> lanes(of.rows);
    int64_t seen = 0;
    for (int kind = 0; kind < 2; ++kind) {
        for (int64_t number = 0; number < of.num_tiles[kind]; ++number) {
            const int64_t* tile = of.tiles[kind] + number * of.tile_fields;  // lane, first row, rows
            std::fill_n(lanes.begin() + tile[1], tile[2], tile[0]);
        }
    }
    for (int64_t row = 0; row < of.rows; ++row) seen += of.seen[row];
    const int64_t each = (seen + of.rows) / of.rows * (of.key_dim + of.value_dim) * of.heads / of.kv_heads;
    in_parts(of.rows * of.kv_heads, each, threads, [&](int64_t first, int64_t last) {
        std::vector<int64_t> slots;
        std::vector<float> scores;
        for (int64_t number = first; number < last; ++number) {  // a head's keys stay near the processor
            const int64_t kv_head = number / of.rows, row = number % of.rows;
            const int64_t count = find_slots(of, lanes[row], row, slots);
            scores.resize(slots.size());
            attend_row(of, row, kv_head, slots.data(), count, scores.data());
        }
    });
}

}  // extern "C"
