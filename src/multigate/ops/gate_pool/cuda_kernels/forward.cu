// The forward pass; after codes.cu.

#if REGISTERS
#define BOUNDS __maxnreg__(REGISTERS)
#else
#define BOUNDS __launch_bounds__(THREADS *TEAMS)
#endif

extern "C" __global__ void BOUNDS
    forward(const __grid_constant__ Rows streams, u64 y, const float *w_gate, const float *w_pool, const float *bias,
            const float *gain, u64 h, u64 new_streams, float *saved, const __grid_constant__ Codes codes,
            long long tokens, float eps) {
    constexpr int COUNT = DOTS;
    typedef Ring<N + 1, 0> TheRing;
    DYNAMIC_SHARED(memory);
    __shared__ u64 barriers[RING ? TEAMS * SLOTS : 1];
    __shared__ float exchange[TEAMS][Sums<COUNT>::GROUPS * WARPS * 32];
    __shared__ float square[TEAMS][WARPS];
    __shared__ float2 coefficients[TEAMS * WARPS][N];
    __shared__ float factors[TEAMS * WARPS][EXACT ? N : 1];
    __shared__ int listed, lost;

    const Place place;
    const int team = place.team, warp = place.warp, lane = place.lane, member = place.member, stream = place.stream;
    TheRing ring = {memory + team * SLOTS * TheRing::SLOT_BYTES, barriers + team * SLOTS};
    if (RING)
        ring.init(warp, lane);

    auto row = [&](long long token, int i) {
        return i < N ? streams.at[min(i, N - 1)] + token * streams.step : y + token * (C * BYTES);
    };
    auto issue = [&](long long token, int slab, int slot) {
        if (warp != 0 || token >= tokens)
            return;
        const u32 bytes = TheRing::bytes(slab);
        if (lane == 0)
            arrive_expecting(ring.barriers + slot, (N + 1) * bytes);
        __syncwarp();
        if (lane <= N)
            bulk_copy(ring.row(slot, lane), row(token, lane) + slab * SLAB_BYTES, bytes, ring.barriers + slot);
    };
#pragma unroll
    for (int q = 0; q < SLOTS; q++)
        issue(place.first + (q / SLABS) * place.stride, q % SLABS, q);
    if (RING)
        team_sync(team);
    if (EXACT) {
        if (threadIdx.x == 0)
            listed = lost = 0;
        __syncthreads();
    }

    const Weights gate_weights(w_gate, member), pool_weights(w_pool, member);
    const Bias the_bias(bias, stream);
    // Without a ring a thread keeps its chunks from the first sweep to the second.
    uint4 kept[RING ? 1 : SLABS][N + 1];
    auto read = [&](int slab, int slot, int i) { return RING ? ring.row(slot, i)[member] : kept[RING ? 0 : slab][i]; };
    int slot = 0;
    u32 parity = 0;
    for (long long token = place.first; token < tokens; token += place.stride) {
        if constexpr (!RING) {
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                const int c = slab * THREADS + member;
#pragma unroll
                for (int i = 0; i <= N; i++)
                    if (in_row(slab, member))
                        kept[slab][i] = __ldg(reinterpret_cast<const uint4 *>(row(token, i)) + c);
            }
        }
        Sums<COUNT> total;
        float *sums = total.values;
        int at = slot;
        u32 phase = parity;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            if (RING)
                wait(ring.barriers + at, phase);
            const int c = slab * THREADS + member;
            if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                float v[CHUNK], s[CHUNK], wg[CHUNK], wp[CHUNK];
                unpack(read(slab, at, N), v);
                gate_weights.get(slab, c, wg);
                pool_weights.get(slab, c, wp);
#pragma unroll
                for (int k = 0; k < CHUNK; k++) {
                    sums[4 * N] += v[k] * v[k];
                    sums[4 * N + 1] += v[k] * wp[k];
                }
#pragma unroll
                for (int i = 0; i < N; i++) {
                    unpack(read(slab, at, i), s);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        sums[i] += s[k] * s[k];
                        sums[N + i] += s[k] * wg[k];
                        sums[2 * N + i] += s[k] * wp[k];
                        sums[3 * N + i] += s[k] * v[k];
                    }
                }
            }
            ring.advance(at, phase);
        }
        total.make(exchange[team], team, warp, lane);
        const int i = min(stream, N - 1);
        const float ss = total.get(i), sg = total.get(N + i), sp = total.get(2 * N + i), sy = total.get(3 * N + i);
        const float yy = total.get(4 * N), yp = total.get(4 * N + 1);
        Step step;
        step.make(ss, sg, sp, sy, yy, yp, the_bias, eps, stream);
        float2 *mine = coefficients[team * WARPS + warp];
        __syncwarp();
        if (lane < N) {
            mine[lane] = make_float2(step.beta, step.alpha);
            if (EXACT)
                factors[team * WARPS + warp][lane] = unlerp_factor(step.beta);
        }
        __syncwarp();

        float pooled[SLABS][CHUNK], hh = 0.0f;
        const u64 out = new_streams + token * (N * C * BYTES), h_row = h + token * (C * BYTES);
        at = slot;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            const int c = slab * THREADS + member;
            u64 far = 0;
#pragma unroll
            for (int k = 0; k < CHUNK; k++)
                pooled[slab][k] = 0.0f;
            if (in_row(slab, member)) {
                float v[CHUNK], s[CHUNK];
                unpack(read(slab, at, N), v);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float2 f = mine[i];
                    const uint4 was = read(slab, at, i);
                    unpack(was, s);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        s[k] = lerp(s[k], v[k], f.x);
                        pooled[slab][k] = fmaf(f.y, s[k], pooled[slab][k]);
                    }
                    const uint4 now = pack(s);
                    store(out + (i * CHUNKS + c) * 16, now);
                    if (EXACT) {
                        const float factor = factors[team * WARPS + warp][i];
                        unpack(now, s);
#pragma unroll
                        for (int k = 0; k < CHUNK; k++)
                            s[k] = unlerp(s[k], v[k], f.x, factor);
                        u32 bits;
                        codes.codes[(token * N + i) * CHUNKS + c] = encode(was, pack(s), bits);
                        far |= (u64)bits << (i * CHUNK);
                    }
                }
                if (NORM) {
#pragma unroll
                    for (int k = 0; k < CHUNK; k++)
                        hh += pooled[slab][k] * pooled[slab][k];
                } else {
                    store(h_row + c * 16, pack(pooled[slab]));
                }
            }
            if (EXACT && slab * WARPS + warp < ROW_GROUPS) {
                int all, begin = 0;
                const int first = before_me(__popcll(far), lane, all);
                if (lane == 0)
                    begin = atomicAdd(&listed, all);
                begin = __shfl_sync(~0u, begin, 0);
                const bool fits = begin + all <= codes.room;
                const int begins = blockIdx.x * codes.room + begin;
                if (lane == 0) {
                    codes.places[token * ROW_GROUPS + slab * WARPS + warp] = fits ? begins : -1;
                    if (!fits)
                        atomicAdd(&lost, all);
                }
                for (int to = begins + first; fits && far; to++, far &= far - 1)
                    codes.list[to] = *far_element(ring, at, member, __ffsll(far) - 1);
            }
            if (RING) {
                team_sync(team);
                issue(token + ((slab + SLOTS) / SLABS) * place.stride, (slab + SLOTS) % SLABS, at);
                ring.advance(at, parity);
            }
        }
        slot = at;

        float r = 0.0f;
        if (NORM) {
            const Gain gains(gain, member);
            r = rsqrtf(over_team(hh, square[team], team, warp) * SCALE + eps);
            store_pooled(h_row, pooled, r, gains, member);
        }
        if (warp == 0) {
            float *line = saved + token * SAVED;
#pragma unroll
            for (int g = 0; g < Sums<COUNT>::GROUPS; g++)
                if (32 * g + lane < COUNT)
                    line[32 * g + lane] = total.dealt[g];
            if (lane < 2)
                line[COUNT + lane] = lane == 0 ? r : step.carry;
            if (lane < N) {
                line[BETA + lane] = step.beta;
                line[ALPHA + lane] = step.alpha;
            }
            if (lane < SAVED - ALPHA - N)
                line[ALPHA + N + lane] = 0.0f;
        }
    }
    if (EXACT) {
        __syncthreads();
        if (threadIdx.x == 0)
            codes.lost[blockIdx.x] = lost;
    }
}
