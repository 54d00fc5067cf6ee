// The streams of the largest gates of a step, copied as they were before it; after step.cu.
//
// A block has a group of tokens. It takes their gates from what the step has saved, looks for the largest
// number that `count` of them reach, bit by bit, and takes those. Of equal ones the first are taken: on every run the same.

constexpr int TOKENS = 2048 / N, PAIRS = TOKENS * N; // of a group
constexpr int KEYS = (PAIRS + THREADS - 1) / THREADS; // of a thread

extern "C" __global__ void __launch_bounds__(THREADS)
    keep(const __grid_constant__ Rows streams, const float *saved, u64 kept, int *places, long long tokens,
         int count) {
    __shared__ u32 keys[KEYS * THREADS]; // the bits of a gate, plus one; none has zero
    __shared__ int list[PAIRS], reached[32], above[WARPS], equal[WARPS];
    const Place place;
    const int warp = place.warp, lane = place.lane, member = place.member;
    const long long first = (long long)blockIdx.x * TOKENS;
    const int here = tokens - first < TOKENS ? tokens - first : TOKENS, wanted = min(count, here * N);

    for (int p = member; p < KEYS * THREADS; p += THREADS)
        keys[p] = p < here * N ? __float_as_uint(saved[(first + p / N) * SAVED + BETA + p % N]) + 1 : 0;
    if (member < 32)
        reached[member] = 0;
    __syncthreads();

    // A warp has a piece of the group, and a lane every 32nd of it.
    u32 mine[KEYS], least = 0;
#pragma unroll
    for (int k = 0; k < KEYS; k++)
        mine[k] = keys[(warp * KEYS + k) * 32 + lane];
    for (int bit = 31; bit >= 0; bit--) {
        const u32 tried = least | 1u << bit;
        int reach = 0;
#pragma unroll
        for (int k = 0; k < KEYS; k++)
            reach += mine[k] >= tried;
        reach = __reduce_add_sync(~0u, reach);
        if (lane == 0)
            atomicAdd(reached + bit, reach);
        __syncthreads();
        if (reached[bit] >= wanted)
            least = tried;
    }

    u32 more[KEYS], same[KEYS];
    int mores = 0, sames = 0;
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        more[k] = __ballot_sync(~0u, mine[k] > least);
        same[k] = __ballot_sync(~0u, mine[k] == least);
        mores += __popc(more[k]);
        sames += __popc(same[k]);
    }
    if (lane == 0)
        above[warp] = mores, equal[warp] = sames;
    __syncthreads();
    int all = 0, before = 0, ties = 0;
    for (int w = 0; w < WARPS; w++) {
        all += above[w];
        before += w < warp ? above[w] : 0;
        ties += w < warp ? equal[w] : 0;
    }
    const u32 below = (1u << lane) - 1;
    const int base = blockIdx.x * count;
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        const int p = (warp * KEYS + k) * 32 + lane, tie = all + ties + __popc(same[k] & below);
        const int slot = mine[k] > least ? before + __popc(more[k] & below)
                         : mine[k] == least && tie < wanted ? tie
                                                            : -1;
        if (p < here * N)
            places[first * N + p] = slot < 0 ? -1 : base + slot;
        if (slot >= 0)
            list[slot] = p;
        before += __popc(more[k]);
        ties += __popc(same[k]);
    }
    __syncthreads();
    for (int slot = warp; slot < wanted; slot += WARPS) {
        const int p = list[slot];
        const u64 from = streams.at[p % N] + (first + p / N) * streams.step;
        const u64 to = kept + (long long)(base + slot) * (C * BYTES);
        for (int c = lane; c < CHUNKS; c += 32)
            store(to + c * 16, __ldg(reinterpret_cast<const uint4 *>(from) + c));
    }
}
