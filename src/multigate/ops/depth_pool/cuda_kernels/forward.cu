// The forward pass of depth_pool; after team.cu.

// Float32 numbers kept for a token: 1 / rms of each source, their logits, 1 / rms of h, zeros.
constexpr int SAVED = (2 * N + 6) / 4 * 4;

extern "C" __global__ void __launch_bounds__(THREADS *TEAMS)
    forward(const __grid_constant__ Rows sources, const float *query, const float *gain, u64 h, float *saved,
            long long tokens, float scale, float eps) {
    constexpr int COUNT = 2 * N;
    typedef Ring<N, 0> TheRing;
    DYNAMIC_SHARED(memory);
    __shared__ u64 barriers[TEAMS * SLOTS];
    __shared__ float exchange[TEAMS][Sums<COUNT>::GROUPS * WARPS * 32];
    __shared__ float square[TEAMS][WARPS];
    __shared__ float weights[TEAMS * WARPS][N];

    const Place place;
    const int team = place.team, warp = place.warp, lane = place.lane, member = place.member, stream = place.stream;
    TheRing ring = {memory + team * SLOTS * TheRing::SLOT_BYTES, barriers + team * SLOTS};
    ring.init(warp, lane);

    auto issue = [&](long long token, int slab, int slot) {
        if (warp != 0 || token >= tokens)
            return;
        const u32 bytes = TheRing::bytes(slab);
        if (lane == 0)
            arrive_expecting(ring.barriers + slot, N * bytes);
        __syncwarp();
        if (lane < N)
            bulk_copy(ring.row(slot, lane), sources.at[min(lane, N - 1)] + token * sources.step + slab * SLAB_BYTES,
                      bytes, ring.barriers + slot);
    };
#pragma unroll
    for (int q = 0; q < SLOTS; q++)
        issue(place.first + (q / SLABS) * place.stride, q % SLABS, q);
    team_sync(team);

    const Weights query_weights(query, member);
    int slot = 0;
    u32 parity = 0;
    for (long long token = place.first; token < tokens; token += place.stride) {
        Sums<COUNT> total;
        float *sums = total.values;
        int at = slot;
        u32 phase = parity;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            wait(ring.barriers + at, phase);
            const int c = slab * THREADS + member;
            if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                float s[CHUNK], w[CHUNK];
                query_weights.get(slab, c, w);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    unpack(ring.row(at, i)[member], s);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        sums[i] += s[k] * s[k];
                        sums[N + i] += s[k] * w[k];
                    }
                }
            }
            ring.advance(at, phase);
        }
        total.make(exchange[team], team, warp, lane);
        const int i = min(stream, N - 1);
        const float r = rsqrtf(total.get(i) * SCALE + eps), logit = scale * total.get(N + i) * r;
        const float alpha = softmax(logit, stream);
        float *mine = weights[team * WARPS + warp];
        __syncwarp();
        if (lane < N)
            mine[lane] = alpha;
        __syncwarp();

        float pooled[SLABS][CHUNK], hh = 0.0f;
        const u64 h_row = h + token * (C * BYTES);
        at = slot;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            const int c = slab * THREADS + member;
#pragma unroll
            for (int k = 0; k < CHUNK; k++)
                pooled[slab][k] = 0.0f;
            if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                float s[CHUNK];
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float f = mine[i];
                    unpack(ring.row(at, i)[member], s);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++)
                        pooled[slab][k] = fmaf(f, s[k], pooled[slab][k]);
                }
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
                    hh += pooled[slab][k] * pooled[slab][k];
            }
            team_sync(team);
            issue(token + ((slab + SLOTS) / SLABS) * place.stride, (slab + SLOTS) % SLABS, at);
            ring.advance(at, parity);
        }
        slot = at;

        const Gain gains(gain, member);
        const float r_h = NORM ? rsqrtf(over_team(hh, square[team], team, warp) * SCALE + eps) : 0.0f;
        store_pooled(h_row, pooled, r_h, gains, member);
        if (warp == 0) {
            float *row = saved + token * SAVED;
            if (lane < N)
                row[lane] = r, row[N + lane] = logit;
            if (lane < SAVED - 2 * N)
                row[2 * N + lane] = lane == 0 ? r_h : 0.0f;
        }
    }
}
