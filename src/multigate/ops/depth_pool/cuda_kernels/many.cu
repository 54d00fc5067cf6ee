// depth_pool over any number of sources, for both passes; after team.cu.
//
// The rows of a token come in groups of N, a group a slot of the team's ring. How many sources there are, and slots, is
// said at the launch, so that a model of any depth needs one kernel a pass. A token stays in shared memory from the first
// sweep over it to the last. SUMS of each row are made by a warp as its group comes, and over the team when all have.

constexpr int MOST = 128;          // sources
constexpr int PER_LANE = MOST / 32; // sources of which a lane makes the coefficients
constexpr int ROW_BYTES = C * BYTES;

struct Sources {
    u64 at[MOST];
    long long step;
};

// Float32 numbers kept for a token: these four, then (1 / rms, logit) of each source, then zeros.
struct Kept {
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

    __device__ __forceinline__ static int bytes(int groups) {
        return groups * (WARPS * SUMS * N * 4 + N * int(sizeof(TERM)));
    }

    __device__ __forceinline__ Room(char *memory, int groups)
        : sums(reinterpret_cast<float *>(memory)),
          terms(reinterpret_cast<TERM *>(memory + groups * WARPS * SUMS * N * 4)) {}

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

// A team's ring of groups. Group q of all that it will see is in slot q % slots.
template <int EXTRA> struct Groups {
    static constexpr int SLOT_BYTES = N * ROW_BYTES + EXTRA;
    char *memory;
    u64 *barriers;
    int slots, count, groups;
    long long token; // of the next group to be asked for
    int group;

    // The warp that issues the copies makes the barriers; the others may wait on them from the team's next sync on.
    __device__ __forceinline__ void init(int warp, int lane) {
        if (warp == 0) {
            for (int slot = lane; slot < slots; slot += 32)
                make_barrier(barriers + slot);
            fence_barriers();
            __syncwarp();
        }
    }

    // Ask for the next group; by the first warp.
    __device__ __forceinline__ void issue(int slot, const Sources &sources, u64 saved, long long stride, int lane) {
        const int first = group * N, rows = min(N, count - first);
        const u32 extra = EXTRA ? 16 + (rows + 1) / 2 * 16 : 0;
        if (lane == 0)
            arrive_expecting(barriers + slot, rows * ROW_BYTES + extra);
        __syncwarp();
        if (lane < rows)
            bulk_copy(row(slot, lane), sources.at[first + lane] + token * sources.step, ROW_BYTES, barriers + slot);
        if (EXTRA && lane == 31) {
            const u64 kept = saved + token * saved_numbers(count) * 4;
            bulk_copy(extra_of(slot), kept, 16, barriers + slot);
            bulk_copy(extra_of(slot) + 16, kept + 16 + first * 8, extra - 16, barriers + slot);
        }
        if (++group == groups)
            group = 0, token += stride;
    }

    __device__ __forceinline__ uint4 *row(int slot, int r) const {
        return reinterpret_cast<uint4 *>(memory + slot * SLOT_BYTES + r * ROW_BYTES);
    }

    __device__ __forceinline__ char *extra_of(int slot) const { return memory + slot * SLOT_BYTES + N * ROW_BYTES; }

    __device__ __forceinline__ const Kept *kept(int slot) const {
        return reinterpret_cast<const Kept *>(extra_of(slot));
    }

    // (1 / rms, logit) of row r of a slot.
    __device__ __forceinline__ float2 pair(int slot, int r) const {
        return reinterpret_cast<const float2 *>(extra_of(slot) + 16)[r];
    }

    __device__ __forceinline__ void advance(int &slot, u32 &parity) const {
        if (++slot == slots)
            slot = 0, parity ^= 1;
    }
};
