// The backward pass of depth_pool over any number of sources; after many.cu and gradients.cu.

// The coefficients of a source in the last sweep, in the order of the terms they multiply.
struct __align__(16) Terms {
    float h, query, s, unused;
};

extern "C" __global__ void __launch_bounds__(THREADS *TEAMS)
    backward(const __grid_constant__ Sources sources, int count, int slots, u64 grad_h, const float *query,
             const float *gain, u64 saved, const __grid_constant__ Sources dsources, float *partials, long long tokens,
             float scale) {
    constexpr int SUMS = 1 + NORM;
    DYNAMIC_SHARED(memory);

    const Place place;
    const int team = place.team, warp = place.warp, lane = place.lane, member = place.member;
    Groups<16 + 8 * N> ring(memory, place, sources, saved, slots, count, tokens);
    Room<SUMS, Terms> room(ring.end, ring.groups, team);
    const int groups = ring.groups;
    ring.start();

    // The gradient of h comes past the ring: it is needed to the end of a token, when its first slots are free.
    uint4 ahead[SLABS];
    auto look_ahead = [&](long long token) {
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            const int c = slab * THREADS + member;
            if ((CHUNKS % THREADS == 0 || c < CHUNKS) && token < tokens)
                ahead[slab] = __ldg(reinterpret_cast<const uint4 *>(grad_h + token * ROW_BYTES + c * 16));
        }
    };
    look_ahead(place.first);

    float dquery[SLABS][CHUNK] = {}, dgain[SLABS][CHUNK] = {};
    const Weights query_weights(query, member), gain_weights(NORM ? gain : query, member);
    int slot = 0;
    u32 parity = 0;
    for (long long token = place.first; token < tokens; token += place.stride) {
        uint4 grads[SLABS];
        float gh[SLABS][CHUNK], h[SLABS][CHUNK] = {};
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            const int c = slab * THREADS + member;
            grads[slab] = ahead[slab];
            if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                unpack(grads[slab], gh[slab]);
                if (NORM) {
                    float g[CHUNK];
                    gain_weights.get(slab, c, g);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++)
                        gh[slab][k] *= g[k];
                }
            }
        }
        look_ahead(token + place.stride);

        int at = slot;
        u32 phase = parity;
        if (NORM)
            for (int group = 0; group < groups; group++) {
                wait(ring.barriers + at, phase);
                const int rows = ring.rows_of(group);
                const Kept kept = ring.kept(at);
                const float logit = ring.pair(at, min(place.stream, rows - 1)).y;
                const float alpha = quotient(expf(logit - kept.top), kept.total);
                for_rows(rows, [&](int j) {
                    const float f = __shfl_sync(~0u, alpha, j);
#pragma unroll
                    for (int slab = 0; slab < SLABS; slab++) {
                        const int c = slab * THREADS + member;
                        if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                            float s[CHUNK];
                            unpack(ring.row(at, j)[c], s);
#pragma unroll
                            for (int k = 0; k < CHUNK; k++)
                                h[slab][k] += f * s[k];
                        }
                    }
                });
                ring.advance(at, phase);
            }

        at = slot, phase = parity;
        for (int group = 0; group < groups; group++) {
            wait(ring.barriers + at, phase);
            const int rows = ring.rows_of(group);
            float sums[power_of_two(SUMS * N)] = {};
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                const int c = slab * THREADS + member;
                if (CHUNKS % THREADS == 0 || c < CHUNKS)
                    for_rows(rows, [&](int j) {
                        float s[CHUNK];
                        unpack(ring.row(at, j)[c], s);
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) {
                            sums[j] += gh[slab][k] * s[k];
                            if (NORM)
                                sums[N + j] += h[slab][k] * s[k];
                        }
                    });
            }
            room.put(sums, group, warp, lane);
            ring.advance(at, phase);
        }
        team_sync(team);

        const Kept kept = ring.kept(slot);
        float r[PER_LANE], logit[PER_LANE], alpha[PER_LANE], dalpha[PER_LANE];
        float along = 0.0f, heaviest = 0.0f;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            alpha[k] = 0.0f;
            if (32 * k < count) {
                const int i = min(32 * k + lane, count - 1), in = slot + i / N;
                const float2 pair = ring.pair(in < slots ? in : in - slots, i % N);
                r[k] = pair.x, logit[k] = pair.y, dalpha[k] = room.get(0, i);
                if (32 * k + lane < count)
                    alpha[k] = quotient(expf(logit[k] - kept.top), kept.total);
                along += alpha[k] * dalpha[k];
                heaviest = fmaxf(heaviest, alpha[k]);
            }
        }
        const float pull_h = NORM ? kept.r_h * kept.r_h * kept.r_h * over_lanes(along) * SCALE : 0.0f;
        heaviest = largest_of_lanes(heaviest);
        float level = LOWEST;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (32 * k < count) {
                if (NORM)
                    dalpha[k] = kept.r_h * dalpha[k] - pull_h * room.get(1, min(32 * k + lane, count - 1));
                if (alpha[k] == heaviest)
                    level = fmaxf(level, dalpha[k]);
            }
        // Taken from that of the heaviest source, where one alpha is nearly 1 what is left of its own is not lost.
        level = largest_of_lanes(level);
        float mean = 0.0f;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (32 * k < count) {
                dalpha[k] -= level;
                mean += alpha[k] * dalpha[k];
            }
        mean = over_lanes(mean);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            const int i = 32 * k + lane;
            if (k % WARPS == warp && i < count) {
                const float dlogit = alpha[k] * (dalpha[k] - mean);
                room.terms[i] = {alpha[k], dlogit * scale * r[k], -dlogit * logit[k] * r[k] * r[k] * SCALE, 0.0f};
            }
        }
        if (NORM) {
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                const int c = slab * THREADS + member;
                if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                    float raw[CHUNK];
                    unpack(grads[slab], raw);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        dgain[slab][k] += kept.r_h * raw[k] * h[slab][k];
                        gh[slab][k] = kept.r_h * gh[slab][k] - pull_h * h[slab][k];
                    }
                }
            }
        }
        team_sync(team);

        at = slot;
        for (int group = 0; group < groups; group++) {
            const int rows = ring.rows_of(group);
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                const int c = slab * THREADS + member;
                const u64 offset = token * dsources.step + c * 16;
                if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                    float w[CHUNK];
                    query_weights.get(slab, c, w);
                    for_rows(rows, [&](int j) {
                        const Terms f = room.terms[group * N + j];
                        const u64 to = dsources.at[group * N + j];
                        float s[CHUNK];
                        unpack(ring.row(at, j)[c], s);
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) {
                            dquery[slab][k] += f.query * s[k];
                            s[k] = f.h * gh[slab][k] + f.query * w[k] + f.s * s[k];
                        }
                        store_if(to, to + offset, pack(s));
                    });
                }
            }
            ring.release(at);
            ring.advance(at, parity);
        }
        slot = at;
    }

    write_partials(ring.rings, dquery, dgain, place, partials);
}
