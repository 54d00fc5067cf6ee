// The forward pass of depth_pool over any number of sources; after many.cu.

extern "C" __global__ void __launch_bounds__(THREADS *TEAMS)
    forward(const __grid_constant__ Sources sources, int count, int slots, const float *query, const float *gain, u64 h,
            float *saved, long long tokens, float scale, float eps) {
    typedef Groups<0> TheRing;
    typedef Room<2, float> TheRoom;
    DYNAMIC_SHARED(memory);
    __shared__ float square[TEAMS][WARPS];

    const Place place;
    const int team = place.team, warp = place.warp, lane = place.lane, member = place.member;
    const int groups = (count + N - 1) / N, numbers = saved_numbers(count);
    char *rooms = memory + TEAMS * slots * TheRing::SLOT_BYTES, *end = rooms + TEAMS * TheRoom::bytes(groups);
    TheRoom room(rooms + team * TheRoom::bytes(groups), groups);
    TheRing ring = {memory + team * slots * TheRing::SLOT_BYTES,
                    reinterpret_cast<u64 *>(end) + team * slots,
                    slots,
                    count,
                    groups,
                    place.first,
                    0};
    ring.init(warp, lane);
    auto issue = [&](int slot) {
        if (warp == 0 && ring.token < tokens)
            ring.issue(slot, sources, 0, place.stride, lane);
    };
    for (int q = 0; q < slots; q++)
        issue(q);
    team_sync(team);

    const Weights query_weights(query, member);
    int slot = 0;
    u32 parity = 0;
    for (long long token = place.first; token < tokens; token += place.stride) {
        int at = slot;
        u32 phase = parity;
        for (int group = 0; group < groups; group++) {
            wait(ring.barriers + at, phase);
            const int last = min(N, count - group * N) - 1;
            float sums[power_of_two(2 * N)] = {};
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                const int c = slab * THREADS + member;
                if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                    float s[CHUNK], w[CHUNK];
                    query_weights.get(slab, c, w);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        unpack(ring.row(at, min(j, last))[c], s);
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) {
                            sums[j] += s[k] * s[k];
                            sums[N + j] += s[k] * w[k];
                        }
                    }
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
                r[k] = rsqrtf(room.get(0, i) * SCALE + eps);
                logit[k] = scale * room.get(1, i) * r[k];
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
            if (k % WARPS == warp && i < groups * N)
                room.terms[i] = real ? quotient(expf(logit[k] - top), total) : 0.0f;
            if (k % WARPS == warp && i < (numbers - 4) / 2)
                reinterpret_cast<float2 *>(saved + token * numbers + 4)[i] =
                    real ? make_float2(r[k], logit[k]) : make_float2(0.0f, 0.0f);
        }
        team_sync(team);

        float pooled[SLABS][CHUNK] = {}, hh = 0.0f;
        at = slot;
        for (int group = 0; group < groups; group++) {
            const int last = min(N, count - group * N) - 1;
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                const int c = slab * THREADS + member;
                if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                    float s[CHUNK];
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        const float f = room.terms[group * N + j];
                        unpack(ring.row(at, min(j, last))[c], s);
#pragma unroll
                        for (int k = 0; k < CHUNK; k++)
                            pooled[slab][k] = fmaf(f, s[k], pooled[slab][k]);
                    }
                }
            }
            team_sync(team);
            issue(at);
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
        const float r_h = NORM ? rsqrtf(over_team(hh, square[team], team, warp) * SCALE + eps) : 0.0f;
        const u64 h_row = h + token * ROW_BYTES;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            const int c = slab * THREADS + member;
            if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                if (NORM) {
                    float g[CHUNK];
                    load_weights(gain, c, g);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++)
                        pooled[slab][k] *= r_h * g[k];
                }
                store(h_row + c * 16, pack(pooled[slab]));
            }
        }
        if (warp == 0 && lane == 0)
            *reinterpret_cast<Kept *>(saved + token * numbers) = {r_h, top, total, 0.0f};
    }
}
