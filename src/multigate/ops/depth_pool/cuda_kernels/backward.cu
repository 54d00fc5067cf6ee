// The backward pass of depth_pool; after gradients.cu.

constexpr int SAVED = (2 * N + 6) / 4 * 4; // as in forward.cu

// The coefficients of source i in the second sweep, in the order of the terms they multiply.
struct Terms {
    float h, query, s, unused;
};

extern "C" __global__ void __launch_bounds__(THREADS *TEAMS)
    backward(const __grid_constant__ Rows sources, u64 grad_h, const float *query, const float *gain,
             const float *saved, const __grid_constant__ Rows dsources, float *partials, long long tokens,
             float scale) {
    constexpr int COUNT = NORM ? 2 * N : N;
    typedef Ring<N + 1, SAVED * 4> TheRing;
    DYNAMIC_SHARED(memory);
    __shared__ u64 barriers[TEAMS * SLOTS];
    __shared__ float exchange[TEAMS][Sums<COUNT>::GROUPS * WARPS * 32];
    __shared__ __align__(16) Terms coefficients[TEAMS * WARPS][N];

    const Place place;
    const int team = place.team, warp = place.warp, lane = place.lane, member = place.member, stream = place.stream;
    TheRing ring = {memory + team * SLOTS * TheRing::SLOT_BYTES, barriers + team * SLOTS};
    ring.init(warp, lane);

    auto issue = [&](long long token, int slab, int slot) {
        if (warp != 0 || token >= tokens)
            return;
        const u32 bytes = TheRing::bytes(slab);
        if (lane == 0)
            arrive_expecting(ring.barriers + slot, (N + 1) * bytes + (slab == 0 ? SAVED * 4 : 0));
        __syncwarp();
        if (lane <= N) {
            const u64 row = lane < N ? sources.at[min(lane, N - 1)] + token * sources.step
                                     : grad_h + token * (C * BYTES);
            bulk_copy(ring.row(slot, lane), row + slab * SLAB_BYTES, bytes, ring.barriers + slot);
        }
        if (slab == 0 && lane == 31)
            bulk_copy(ring.extra(slot), reinterpret_cast<u64>(saved + token * SAVED), SAVED * 4, ring.barriers + slot);
    };
#pragma unroll
    for (int q = 0; q < SLOTS; q++)
        issue(place.first + (q / SLABS) * place.stride, q % SLABS, q);
    team_sync(team);

    float dquery[SLABS][CHUNK], dgain[SLABS][CHUNK];
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
            dquery[slab][k] = dgain[slab][k] = 0.0f;
    const Weights query_weights(query, member), gain_weights(NORM ? gain : query, member);

    int slot = 0;
    u32 parity = 0;
    for (long long token = place.first; token < tokens; token += place.stride) {
        wait(ring.barriers + slot, parity);
        const float *kept = ring.extra(slot);
        const int i = min(stream, N - 1);
        const float r = kept[i], logit = kept[N + i], r_h = kept[2 * N];
        const float alpha = softmax(logit, stream);
        Terms *mine = coefficients[team * WARPS + warp];
        __syncwarp();
        if (lane < N)
            mine[lane].h = alpha;
        __syncwarp();

        Sums<COUNT> total;
        float *sums = total.values;
        float h[SLABS][CHUNK];
        int at = slot;
        u32 phase = parity;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            if (slab > 0)
                wait(ring.barriers + at, phase);
            const int c = slab * THREADS + member;
            if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                float gh[CHUNK], s[CHUNK];
                unpack(ring.row(at, N)[member], gh);
                if (NORM) {
                    gain_weights.get(slab, c, s);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        gh[k] *= s[k];
                        h[slab][k] = 0.0f;
                    }
#pragma unroll
                    for (int i = 0; i < N; i++) {
                        unpack(ring.row(at, i)[member], s);
                        const float f = mine[i].h;
#pragma unroll
                        for (int k = 0; k < CHUNK; k++)
                            h[slab][k] += f * s[k];
                    }
                }
#pragma unroll
                for (int i = 0; i < N; i++) {
                    unpack(ring.row(at, i)[member], s);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        sums[i] += gh[k] * s[k];
                        if (NORM)
                            sums[N + i] += h[slab][k] * s[k];
                    }
                }
            }
            ring.advance(at, phase);
        }
        total.make(exchange[team], team, warp, lane);

        float dalpha = total.get(i), scale_h = 1.0f, pull_h = 0.0f;
        if (NORM) {
            const float along = over_streams(alpha * dalpha);
            scale_h = r_h;
            pull_h = r_h * r_h * r_h * along * SCALE;
            dalpha = scale_h * dalpha - pull_h * total.get(N + i);
        }
        const float dlogit = softmax_gradient(alpha, dalpha);
        __syncwarp();
        if (lane < N)
            mine[lane] = {alpha, dlogit * scale * r, -dlogit * logit * r * r * SCALE, 0.0f};
        __syncwarp();

        at = slot;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            const int c = slab * THREADS + member;
            if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                float gh[CHUNK], w[CHUNK], s[CHUNK];
                unpack(ring.row(at, N)[member], gh);
                query_weights.get(slab, c, w);
                if (NORM) {
                    gain_weights.get(slab, c, s);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        const float scaled = scale_h * gh[k];
                        dgain[slab][k] += scaled * h[slab][k];
                        gh[k] = scaled * s[k] - pull_h * h[slab][k];
                    }
                }
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const Terms f = mine[i];
                    unpack(ring.row(at, i)[member], s);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        dquery[slab][k] += f.query * s[k];
                        s[k] = f.h * gh[k] + f.query * w[k] + f.s * s[k];
                    }
                    if (dsources.at[i])
                        store(dsources.at[i] + token * dsources.step + c * 16, pack(s));
                }
            }
            team_sync(team);
            issue(token + ((slab + SLOTS) / SLABS) * place.stride, (slab + SLOTS) % SLABS, at);
            ring.advance(at, parity);
        }
        slot = at;
    }

    write_partials(memory, dquery, dgain, place, partials);
}
