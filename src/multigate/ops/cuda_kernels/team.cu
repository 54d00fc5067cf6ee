// What the one-pass kernels share; after machine.cu.
//
// A *team* of WARPS warps handles one token at a time. Its N rows (and a few more) come into shared memory by bulk
// copies, several tokens ahead; a first sweep over them makes every dot product that is needed, one reduction turns
// these into coefficients, and a second sweep writes the results. Device memory is read once and written once.
//
// The forward step can do without the ring (SLOTS 0): a team is given one token, reads it into registers, and ends. The
// multiprocessors, which are not equally fast, then take as many tokens as they can.
//
// Set by the caller (see ../cuda.py): N streams or sources, C width, DTYPE (0 bfloat16, 1 float16, 2 float32) of rows,
// NORM (h is written as RMSNorm(h) * gain), WARPS a team, TEAMS a block, SLOTS slabs in a team's ring, HOLD (weights
// stay in registers over all tokens).

constexpr int BYTES = DTYPE == 2 ? 4 : 2;
constexpr int CHUNK = 16 / BYTES;                        // numbers in the 16 bytes a thread moves at once
constexpr int CHUNKS = C / CHUNK;                        // of a row
constexpr int THREADS = 32 * WARPS;                      // of a team
constexpr int SLABS = (CHUNKS + THREADS - 1) / THREADS;  // pieces of a token: one chunk a thread and row
constexpr int SLAB_BYTES = THREADS * 16;                 // of one row
constexpr int LANES = N == 1 ? 1 : N == 2 ? 2 : N <= 4 ? 4 : N <= 8 ? 8 : 16;
constexpr float SCALE = 1.0f / C;
constexpr float LOWEST = -3.402823466e38f;
constexpr float EPSILON = DTYPE == 0 ? 0x1p-7f : DTYPE == 1 ? 0x1p-10f : 0x1p-23f; // of the rows

constexpr bool RING = SLOTS > 0;
static_assert(!RING || SLOTS >= SLABS, "a token must fit into the ring");

struct Rows {
    u64 at[N];      // where stream i of token 0 begins
    long long step; // bytes from one token to the next
};

__device__ __forceinline__ void unpack(uint4 raw, float *v) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (DTYPE == 0) {
            v[2 * k] = __uint_as_float(words[k] << 16);
            v[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
        } else if (DTYPE == 1) {
            two_from_half(words[k], v[2 * k], v[2 * k + 1]);
        } else {
            v[k] = __uint_as_float(words[k]);
        }
    }
}

__device__ __forceinline__ uint4 pack(const float *v) {
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        words[k] = DTYPE == 0   ? two_to_bfloat(v[2 * k], v[2 * k + 1])
                   : DTYPE == 1 ? two_to_half(v[2 * k], v[2 * k + 1])
                                : __float_as_uint(v[k]);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Whether a thread has a chunk of a row in this slab; in all but the last every thread has.
__device__ __forceinline__ bool in_row(int slab, int member) {
    return (slab + 1) * THREADS <= CHUNKS || slab * THREADS + member < CHUNKS;
}

// The weights of a thread's chunk, from memory that the kernel never writes.
__device__ __forceinline__ void load_weights(const float *w, int chunk, float *v) {
#pragma unroll
    for (int k = 0; k < CHUNK; k += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4 *>(w + chunk * CHUNK + k));
        v[k] = four.x, v[k + 1] = four.y, v[k + 2] = four.z, v[k + 3] = four.w;
    }
}

// Weights that stay in registers over all tokens (HOLD), or are read again through the cache.
struct Weights {
    const float *from;
    float held[HOLD ? SLABS : 1][CHUNK];

    __device__ __forceinline__ Weights(const float *w, int member) : from(w) {
        if (HOLD) {
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                const int c = slab * THREADS + member;
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
                    held[slab][k] = 0.0f;
                if (CHUNKS % THREADS == 0 || c < CHUNKS)
                    load_weights(w, c, held[slab]);
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
                    pin(held[slab][k]);
            }
        }
    }

    __device__ __forceinline__ void get(int slab, int chunk, float *v) const {
        if (HOLD) {
#pragma unroll
            for (int k = 0; k < CHUNK; k++)
                v[k] = held[slab][k];
        } else {
            load_weights(from, chunk, v);
        }
    }
};

__device__ __forceinline__ float quotient(float a, float b) { return DTYPE == 2 ? a / b : __fdividef(a, b); }

__device__ __forceinline__ void team_sync(int team) {
    if (WARPS == 1)
        __syncwarp();
    else if (TEAMS == 1)
        __syncthreads();
    else
        sync_some<THREADS>(team + 1);
}

// Sum over groups of SIZE lanes of SIZE values at once, SIZE - 1 shuffles instead of SIZE log2(SIZE): lane l of a group ends
// with the sum of v[l] in v[0].
template <int SIZE> __device__ __forceinline__ void sum_and_deal(float *v, int lane) {
    if constexpr (SIZE > 1) {
        constexpr int HALF = SIZE / 2;
        const bool upper = lane & HALF;
#pragma unroll
        for (int k = 0; k < HALF; k++) {
            const float give = upper ? v[k] : v[k + HALF];
            const float keep = upper ? v[k + HALF] : v[k];
            v[k] = keep + __shfl_xor_sync(~0u, give, HALF);
        }
        sum_and_deal<HALF>(v, lane);
    }
}

__device__ constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// The sums over a team of COUNT values of each thread; sum k is with lane k % 32 of every warp, in dealt[k / 32]. Before
// `exchange` is used again the team must have met: it does when it frees a slot.
template <int COUNT> struct Sums {
    static constexpr int GROUPS = (COUNT + 31) / 32, LAST = power_of_two(COUNT - 32 * (GROUPS - 1));
    float values[GROUPS * 32], dealt[GROUPS];

    __device__ __forceinline__ Sums() {
#pragma unroll
        for (int k = 0; k < GROUPS * 32; k++)
            values[k] = 0.0f;
    }

    __device__ __forceinline__ void make(float *exchange, int team, int warp, int lane) {
#pragma unroll
        for (int g = 0; g < GROUPS - 1; g++)
            sum_and_deal<32>(values + 32 * g, lane);
        float *last = values + 32 * (GROUPS - 1);
        sum_and_deal<LAST>(last, lane);
#pragma unroll
        for (int o = LAST; o < 32; o *= 2)
            last[0] += __shfl_xor_sync(~0u, last[0], o);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            dealt[g] = values[32 * g];
        if (WARPS > 1) {
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                exchange[(g * WARPS + warp) * 32 + lane] = dealt[g];
            team_sync(team);
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                dealt[g] = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++)
                    dealt[g] += exchange[(g * WARPS + w) * 32 + lane];
            }
        }
    }

    __device__ __forceinline__ float get(int k) const {
        float found = __shfl_sync(~0u, dealt[0], k & 31);
#pragma unroll
        for (int g = 1; g < GROUPS; g++) {
            const float other = __shfl_sync(~0u, dealt[g], k & 31);
            found = k / 32 == g ? other : found;
        }
        return found;
    }
};

__device__ __forceinline__ float over_streams(float x) {
#pragma unroll
    for (int o = LANES / 2; o >= 1; o /= 2)
        x = __fadd_rn(x, __shfl_xor_sync(~0u, x, o));
    return x;
}

__device__ __forceinline__ float largest(float x) {
#pragma unroll
    for (int o = LANES / 2; o >= 1; o /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
    return x;
}

// softmax over the streams of a number of each; lane i (modulo LANES) has stream i's.
__device__ __forceinline__ float softmax(float logit, int stream) {
    const bool real = stream < N;
    const float top = largest(real ? logit : LOWEST), e = real ? expf(logit - top) : 0.0f;
    return quotient(e, over_streams(e));
}

// alpha_i sum_j alpha_j (dalpha_i - dalpha_j): differences first, which keeps what is left where one alpha is nearly 1.
__device__ __forceinline__ float softmax_gradient(float alpha, float dalpha) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++)
        sum += __shfl_sync(~0u, alpha, j) * (dalpha - __shfl_sync(~0u, dalpha, j));
    return alpha * sum;
}

// The sum over a team of one number of each thread.
__device__ __forceinline__ float over_team(float x, float *room, int team, int warp) {
#pragma unroll
    for (int o = 16; o >= 1; o /= 2)
        x += __shfl_xor_sync(~0u, x, o);
    if (WARPS > 1) {
        room[warp] = x;
        team_sync(team);
        x = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            x += room[w];
    }
    return x;
}

// A row of C numbers of which each thread has its chunks.
__device__ __forceinline__ void put_row(float *row, const float (&v)[SLABS][CHUNK], int member) {
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            const int c = (slab * THREADS + member) * CHUNK + k;
            if (c < C)
                row[c] = v[slab][k];
        }
}

// The `columns` sums of all teams of a block, added in the order of the teams: the same in every run.
__device__ __forceinline__ void add_teams(const float *sums, int columns, float *row) {
    for (int c = threadIdx.x; c < columns; c += THREADS * TEAMS) {
        float sum = 0.0f;
        for (int t = 0; t < TEAMS; t++)
            sum += sums[t * columns + c];
        row[c] = sum;
    }
}

// Where a thread stands, and which tokens its team takes.
struct Place {
    int team, warp, lane, member, stream;
    long long first, stride;

    // The broadcast tells the compiler that a warp stays together through the loop over tokens. Neighbouring tokens go
    // to different blocks, so that what is left over in the last round is spread over all of them.
    __device__ __forceinline__ Place() {
        const int wave = __shfl_sync(~0u, threadIdx.x / 32, 0);
        team = wave / WARPS, warp = wave % WARPS, lane = threadIdx.x % 32;
        member = 32 * warp + lane, stream = lane & (LANES - 1);
        first = (long long)team * gridDim.x + blockIdx.x, stride = (long long)gridDim.x * TEAMS;
    }
};

// A team's ring of slabs in shared memory. Slab q of the tokens it will see is in slot q % SLOTS.
template <int ROWS, int EXTRA> struct Ring {
    static constexpr int SLOT_BYTES = ROWS * SLAB_BYTES + EXTRA;
    char *memory;
    u64 *barriers;

    // The warp that issues the copies makes the barriers; the others may wait on them from the team's next sync on.
    __device__ __forceinline__ void init(int warp, int lane) {
        if (warp == 0) {
            if (lane < SLOTS)
                make_barrier(barriers + lane);
            fence_barriers();
            __syncwarp();
        }
    }

    __device__ __forceinline__ uint4 *row(int slot, int r) const {
        return reinterpret_cast<uint4 *>(memory + slot * SLOT_BYTES + r * SLAB_BYTES);
    }

    __device__ __forceinline__ const float *extra(int slot) const {
        return reinterpret_cast<const float *>(memory + slot * SLOT_BYTES + ROWS * SLAB_BYTES);
    }

    __device__ __forceinline__ static void advance(int &slot, u32 &parity) {
        if (++slot == SLOTS)
            slot = 0, parity ^= 1;
    }

    __device__ __forceinline__ static u32 bytes(int slab) {
        return slab == SLABS - 1 ? C * BYTES - (SLABS - 1) * SLAB_BYTES : SLAB_BYTES;
    }
};
