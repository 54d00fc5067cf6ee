// depth_pool over any number of sources, for both passes; after team.cu.
//
// The rows of a token come in groups of N, a group a slot of the team's ring. How many sources there are, and slots, is
// said at the launch, so that a model of any depth needs one kernel a pass. A token stays in shared memory from the first
// sweep over it to the last. SUMS of each row are made by a warp as its group comes, and over the team when all have.

constexpr int MOST = 128;           // sources
constexpr int PER_LANE = MOST / 32; // sources of which a lane makes the coefficients
constexpr int ROW_BYTES = C * BYTES;
static_assert(N % 4 == 0 && MOST % N == 0 && 2 * N <= 32, "groups must be aligned, and a warp have a lane for each sum");

struct Sources {
    u64 at[MOST];
    long long step;
};

// Float32 numbers kept for a token: these four, then (1 / rms, logit) of each source, then zeros.
struct __align__(16) Kept {
    float r_h, top, total, unused;
};

__device__ __forceinline__ int saved_numbers(int count) { return (2 * count + 6) / 4 * 4; }

__device__ __forceinline__ float over_lanes(float x) {
#pragma unroll
    for (int o = 16; o >= 1; o /= 2)
        x += __shfl_xor_sync(~0u, x, o);
    return x;
}

__device__ __forceinline__ float largest_of_lanes(float x) {
#pragma unroll
    for (int o = 16; o >= 1; o /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
    return x;
}

// What a team has in shared memory beside its ring: the sums of its warps, then a TERM of every source.
template <int SUMS, class TERM> struct Room {
    float *sums;
    TERM *terms;

    // In the memory after the rings.
    __device__ __forceinline__ Room(char *memory, int groups, int team) {
        const int of_sums = groups * WARPS * SUMS * N * 4, of_terms = groups * N * int(sizeof(TERM));
        memory += team * (of_sums + of_terms);
        sums = reinterpret_cast<float *>(memory), terms = reinterpret_cast<TERM *>(memory + of_sums);
    }

    // Sum k of row j of a group is values[k * N + j] of each thread.
    __device__ __forceinline__ void put(float *values, int group, int warp, int lane) {
        constexpr int COUNT = SUMS * N, SIZE = power_of_two(COUNT);
        sum_and_deal<SIZE>(values, lane);
#pragma unroll
        for (int o = SIZE; o < 32; o *= 2)
            values[0] += __shfl_xor_sync(~0u, values[0], o);
        if (lane < COUNT)
            sums[(group * WARPS + warp) * COUNT + lane] = values[0];
    }

    // Sum k of source i over the team, once it has met.
    __device__ __forceinline__ float get(int k, int i) const {
        const float *from = sums + i / N * WARPS * SUMS * N + k * N + i % N;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            sum += from[w * SUMS * N];
        return sum;
    }
};

// body(j) for each row of a group; a whole group without a branch between.
template <class Body> __device__ __forceinline__ void for_rows(int rows, Body body) {
    if (rows == N) {
#pragma unroll
        for (int j = 0; j < N; j++)
            body(j);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < rows)
                body(j);
    }
}

// A team's ring of groups. Group q of all that it will see is in slot q % slots. With a slot for each group of a token the
// last slot has room for the rows that are left, and no more. The rings of a block come after the barriers of all of them.
template <int EXTRA> struct Groups {
    static constexpr int SLOT_BYTES = EXTRA + N * ROW_BYTES;
    const Place &place;
    const Sources &sources;
    const u64 saved; // what EXTRA takes from
    const int slots, count, groups;
    const long long tokens;
    char *rings, *memory, *end; // where those of the block begin, this one, and where they end
    u64 *barriers;
    long long token; // of the next group to be asked for
    int group = 0;

    __device__ __forceinline__ Groups(char *shared, const Place &place, const Sources &sources, u64 saved, int slots,
                                      int count, long long tokens)
        : place(place), sources(sources), saved(saved), slots(slots), count(count), groups((count + N - 1) / N),
          tokens(tokens), token(place.first) {
        const int unused = slots * N - count, in_a_row = (slots + 1) / 2 * 2;
        const int bytes = slots * SLOT_BYTES - (unused < N ? unused * ROW_BYTES : 0);
        barriers = reinterpret_cast<u64 *>(shared) + place.team * in_a_row;
        rings = shared + TEAMS * in_a_row * 8;
        memory = rings + place.team * bytes;
        end = rings + TEAMS * bytes;
    }

    // The first warp makes the barriers, and every slot is asked for.
    __device__ __forceinline__ void start() {
        if (place.warp == 0) {
            for (int slot = place.lane; slot < slots; slot += 32)
                make_barrier(barriers + slot);
            fence_barriers();
        }
        team_sync(place.team);
        for (int slot = 0; slot < slots && token < tokens; slot++) {
            announce(slot);
            issue(slot);
        }
    }

    // When a thread is done with a slot: it goes on when the team is, and the slot is asked for anew.
    __device__ __forceinline__ void release(int slot) {
        const bool more = token < tokens;
        if (more)
            announce(slot);
        team_sync(place.team);
        if (more)
            issue(slot);
    }

    __device__ __forceinline__ int rows_of(int which) const { return min(N, count - which * N); }

    __device__ __forceinline__ static u32 extra_bytes(int rows) { return EXTRA ? 16 + (rows + 1) / 2 * 16 : 0; }

    // Say what will come into a slot; its readers may still be at work.
    __device__ __forceinline__ void announce(int slot) const {
        const int rows = rows_of(group);
        if (place.member == 0)
            arrive_expecting(barriers + slot, rows * ROW_BYTES + extra_bytes(rows));
    }

    // Ask for it, each warp for some of its rows, and go on to the next group.
    __device__ __forceinline__ void issue(int slot) {
        const int first = group * N, rows = rows_of(group), r = place.lane * WARPS + place.warp;
        if (r < rows)
            bulk_copy(row(slot, r), sources.at[first + r] + token * sources.step, ROW_BYTES, barriers + slot);
        if (EXTRA && place.warp == WARPS - 1 && place.lane == 31) {
            const u64 kept = saved + token * saved_numbers(count) * 4;
            bulk_copy(extra(slot), kept, 16, barriers + slot);
            bulk_copy(extra(slot) + 16, kept + 16 + first * 8, extra_bytes(rows) - 16, barriers + slot);
        }
        if (++group == groups)
            group = 0, token += place.stride;
    }

    __device__ __forceinline__ char *extra(int slot) const { return memory + slot * SLOT_BYTES; }

    __device__ __forceinline__ uint4 *row(int slot, int r) const {
        return reinterpret_cast<uint4 *>(extra(slot) + EXTRA + r * ROW_BYTES);
    }

    __device__ __forceinline__ Kept kept(int slot) const { return *reinterpret_cast<const Kept *>(extra(slot)); }

    // (1 / rms, logit) of row r of a slot.
    __device__ __forceinline__ float2 pair(int slot, int r) const {
        return reinterpret_cast<const float2 *>(extra(slot) + 16)[r];
    }

    __device__ __forceinline__ void advance(int &slot, u32 &parity) const {
        if (++slot == slots)
            slot = 0, parity ^= 1;
    }
};
