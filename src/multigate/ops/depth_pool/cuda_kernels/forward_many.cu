// The forward pass of depth_pool over any number of sources; after many.cu.

extern "C" __global__ void __launch_bounds__(THREADS *TEAMS)
    forward(const __grid_constant__ Sources sources, int count, int slots, const float *query, const float *gain, u64 h,
            float *saved, long long tokens, float scale, float eps) {
    DYNAMIC_SHARED(memory);
    __shared__ float square[TEAMS][WARPS];

    const Place place;
    const int team = place.team, warp = place.warp, lane = place.lane, member = place.member;
    Groups<0> ring(memory, place, sources, 0, slots, count, tokens);
    Room<2, float> room(ring.end, ring.groups, team);
    const int groups = ring.groups, numbers = saved_numbers(count);
    ring.start();

    const Weights query_weights(query, member);
    int slot = 0;
    u32 parity = 0;
    for (long long token = place.first; token < tokens; token += place.stride) {
        int at = slot;
        u32 phase = parity;
        for (int group = 0; group < groups; group++) {
            wait(ring.barriers + at, phase);
            const int rows = ring.rows_of(group);
            float sums[power_of_two(2 * N)] = {};
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                const int c = slab * THREADS + member;
                if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                    float w[CHUNK];
                    query_weights.get(slab, c, w);
                    for_rows(rows, [&](int j) {
                        float s[CHUNK];
                        unpack(ring.row(at, j)[c], s);
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) {
                            sums[j] += s[k] * s[k];
                            sums[N + j] += s[k] * w[k];
                        }
                    });
                }
            }
            room.put(sums, group, warp, lane);
            ring.advance(at, phase);
        }
        team_sync(team);

        float r[PER_LANE], logit[PER_LANE], top = LOWEST, total = 0.0f;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (32 * k < count) {
                const int i = min(32 * k + lane, count - 1);
                r[k] = __frsqrt_rn(room.get(0, i) * SCALE + eps);
                // Rounded: the backward pass weighs with the logit that is kept.
                logit[k] = __fmul_rn(scale * room.get(1, i), r[k]);
                top = fmaxf(top, logit[k]);
            }
        top = largest_of_lanes(top);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (32 * k + lane < count)
                total += expf(logit[k] - top);
        total = over_lanes(total);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            const int i = 32 * k + lane;
            const bool real = i < count;
            if (k % WARPS == warp && real)
                room.terms[i] = quotient(expf(logit[k] - top), total);
            if (k % WARPS == warp && i < (numbers - 4) / 2)
                reinterpret_cast<float2 *>(saved + token * numbers + 4)[i] =
                    real ? make_float2(r[k], logit[k]) : make_float2(0.0f, 0.0f);
        }
        team_sync(team);

        float pooled[SLABS][CHUNK] = {}, hh = 0.0f;
        at = slot;
        for (int group = 0; group < groups; group++) {
            const int rows = ring.rows_of(group);
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                const int c = slab * THREADS + member;
                if (CHUNKS % THREADS == 0 || c < CHUNKS)
                    for_rows(rows, [&](int j) {
                        const float f = room.terms[group * N + j];
                        float s[CHUNK];
                        unpack(ring.row(at, j)[c], s);
#pragma unroll
                        for (int k = 0; k < CHUNK; k++)
                            pooled[slab][k] = fmaf(f, s[k], pooled[slab][k]);
                    });
            }
            ring.release(at);
            ring.advance(at, parity);
        }
        slot = at;

        if (NORM) {
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
                    hh += pooled[slab][k] * pooled[slab][k];
        }
        const Gain gains(gain, member);
        const float r_h = NORM ? __frsqrt_rn(over_team(hh, square[team], team, warp) * SCALE + eps) : 0.0f;
        store_pooled(h + token * ROW_BYTES, pooled, r_h, gains, member);
        if (warp == 0 && lane == 0)
            *reinterpret_cast<Kept *>(saved + token * numbers) = {r_h, top, total, 0.0f};
    }
}
