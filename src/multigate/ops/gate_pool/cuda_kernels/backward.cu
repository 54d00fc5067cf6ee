// The backward pass; after finish.cu and codes.cu. Set by the caller: GRAD_STREAMS and GRAD_H, which gradients there are, and
// INVERT: `streams` are those after the step, and those before it are made of them and written to `old`. Where places
// >= 0 for a token and stream, the one before it is that row of `kept`; with EXACT it is put right by its codes.

// One row of `partials` a block: the sums over its tokens of dw_gate, dw_pool, dbias and, with the norm, dgain.
constexpr int BIASES = N + COMPETITIVE, PARTIAL = (2 + NORM) * C + BIASES;

// The coefficients of stream i in the second sweep, in the order of the terms they multiply.
struct Terms {
    float grad, h, pool, gate, s, y, beta, unused;
};

extern "C" __global__ void __launch_bounds__(THREADS *TEAMS)
    backward(const __grid_constant__ Rows streams, u64 y, u64 grad_streams, u64 grad_h, const float *w_gate,
             const float *w_pool, const float *gain, const float *saved, u64 dstreams, u64 dy,
             float *partials, u64 kept, const int *places, const __grid_constant__ Codes codes, u64 old, long long tokens,
             float eps) {
    constexpr int COUNT = NORM ? 4 * N + 2 : 3 * N + 1;
    constexpr int GRADS = N, Y = GRADS + (GRAD_STREAMS ? N : 0), H = Y + 1, ROWS = H + GRAD_H;
    typedef Ring<ROWS, SAVED * 4> TheRing;
    static_assert(!INVERT || SLOTS % SLABS == 0, "a token's slabs are asked for together");
    DYNAMIC_SHARED(memory);
    __shared__ u64 barriers[TEAMS * SLOTS];
    __shared__ float exchange[TEAMS][Sums<COUNT>::GROUPS * WARPS * 32];
    __shared__ __align__(16) Terms coefficients[TEAMS * WARPS][N];

    const Place place;
    const int team = place.team, warp = place.warp, lane = place.lane, member = place.member, stream = place.stream;
    TheRing ring = {memory + team * SLOTS * TheRing::SLOT_BYTES, barriers + team * SLOTS};
    ring.init(warp, lane);

    // A lane's place in `kept` for its stream of a token.
    auto place_of = [&](long long token) {
        return INVERT && !EXACT && lane < N && token < tokens ? places[token * N + lane] : -1;
    };
    auto issue = [&](long long token, int slab, int slot, int at) {
        if (warp != 0 || token >= tokens)
            return;
        const u32 bytes = TheRing::bytes(slab);
        if (lane == 0)
            arrive_expecting(ring.barriers + slot, ROWS * bytes + (slab == 0 ? SAVED * 4 : 0));
        __syncwarp();
        for (int r = lane; r < ROWS; r += 32) {
            u64 row = r < N    ? streams.at[min(r, N - 1)] + token * streams.step
                      : r < Y  ? grad_streams + (token * N + r - GRADS) * (C * BYTES)
                      : r == Y ? y + token * (C * BYTES)
                               : grad_h + token * (C * BYTES);
            if (INVERT && !EXACT && r < N && at >= 0)
                row = kept + (long long)at * (C * BYTES);
            bulk_copy(ring.row(slot, r), row + slab * SLAB_BYTES, bytes, ring.barriers + slot);
        }
        if (slab == 0 && lane == 31)
            bulk_copy(ring.extra(slot), reinterpret_cast<u64>(saved + token * SAVED), SAVED * 4,
                      ring.barriers + slot);
    };
#pragma unroll
    for (int q = 0; q < SLOTS; q++)
        issue(place.first + (q / SLABS) * place.stride, q % SLABS, q,
              place_of(place.first + (q / SLABS) * place.stride));
    team_sync(team);

    float dgate[SLABS][CHUNK], dpool[SLABS][CHUNK], dgain[SLABS][CHUNK];
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
            dgate[slab][k] = dpool[slab][k] = dgain[slab][k] = 0.0f;
    float db = 0.0f, dcarry = 0.0f;
    const Weights gate_weights(w_gate, member), pool_weights(w_pool, member), gain_weights(NORM ? gain : w_gate, member);

    int slot = 0;
    u32 parity = 0;
    for (long long token = place.first; token < tokens; token += place.stride) {
        // Asked for before the waiting: the answers are here after it.
        const int here = place_of(token), next = place_of(token + SLOTS / SLABS * place.stride);
        Code code[N];
        int listed = -1;
        auto ask = [&](int slab) {
            const int c = slab * THREADS + member;
#pragma unroll
            for (int i = 0; EXACT && i < N; i++)
                code[i] = c < CHUNKS ? codes.codes[(token * N + i) * CHUNKS + c] : 0;
            if (EXACT && slab * WARPS + warp < ROW_GROUPS)
                listed = codes.places[token * ROW_GROUPS + slab * WARPS + warp];
        };
        ask(0);
        wait(ring.barriers + slot, parity);
        const float *numbers = ring.extra(slot);
        const int i = min(stream, N - 1);
        const float ss = numbers[i], sg = numbers[N + i], sp = numbers[2 * N + i], sy = numbers[3 * N + i];
        const float yy = numbers[4 * N], yp = numbers[4 * N + 1], r_h = numbers[4 * N + 2];
        Step step;
        step.recall(ss, sg, sp, sy, yy, yp, numbers, eps, stream);
        const float share = step.alpha * step.rest, share_y = over_streams(step.alpha * step.beta);
        Terms *mine = coefficients[team * WARPS + warp];
        __syncwarp();
        if (lane < N) {
            mine[lane].h = share;
            if (INVERT) {
                const float beta = here < 0 ? step.beta : 0.0f;
                mine[lane].beta = beta;
                mine[lane].s = unlerp_factor(beta);
            }
        }
        __syncwarp();

        Sums<COUNT> total;
        float *sums = total.values;
        float h[SLABS][CHUNK];
        int at = slot;
        u32 phase = parity;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            if (slab > 0) {
                ask(slab);
                wait(ring.barriers + at, phase);
            }
            const int c = slab * THREADS + member;
            const bool live = CHUNKS % THREADS == 0 || c < CHUNKS;
            if (INVERT) {
                // In place: from here on the ring has the streams before the step.
                u64 far = 0;
#pragma unroll
                for (int i = 0; live && i < N; i++) {
                    const float beta = mine[i].beta, factor = mine[i].s;
                    float v[CHUNK], s[CHUNK];
                    unpack(ring.row(at, Y)[member], v);
                    unpack(ring.row(at, i)[member], s);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++)
                        s[k] = unlerp(s[k], v[k], beta, factor);
                    uint4 was = pack(s);
                    if (EXACT) {
                        u32 bits;
                        was = decode(was, code[i], bits);
                        far |= (u64)bits << (i * CHUNK);
                    }
                    ring.row(at, i)[member] = was;
                }
                if (EXACT && slab * WARPS + warp < ROW_GROUPS) {
                    int all;
                    int from = before_me(__popcll(far), lane, all) + listed;
                    for (; listed >= 0 && far; from++, far &= far - 1)
                        *far_element(ring, at, member, __ffsll(far) - 1) = codes.list[from];
                    look_again();
                }
#pragma unroll
                for (int i = 0; live && i < N; i++)
                    store(old + ((token * N + i) * CHUNKS + c) * 16, ring.row(at, i)[member]);
            }
            if (live) {
                float v[CHUNK], gh[CHUNK], s[CHUNK], g[CHUNK];
                unpack(ring.row(at, Y)[member], v);
                if (GRAD_H)
                    unpack(ring.row(at, H)[member], gh);
                if (NORM && GRAD_H) {
                    gain_weights.get(slab, c, g);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        gh[k] *= g[k];
                        h[slab][k] = share_y * v[k];
                    }
#pragma unroll
                    for (int i = 0; i < N; i++) {
                        unpack(ring.row(at, i)[member], s);
                        const float f = mine[i].h;
#pragma unroll
                        for (int k = 0; k < CHUNK; k++)
                            h[slab][k] += f * s[k];
                    }
#pragma unroll
                    for (int k = 0; k < CHUNK; k++)
                        sums[4 * N + 1] += h[slab][k] * v[k];
                }
                if (GRAD_H) {
#pragma unroll
                    for (int k = 0; k < CHUNK; k++)
                        sums[3 * N] += gh[k] * v[k];
                }
#pragma unroll
                for (int i = 0; i < N; i++) {
                    unpack(ring.row(at, i)[member], s);
                    if (GRAD_STREAMS)
                        unpack(ring.row(at, GRADS + i)[member], g);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        if (GRAD_H)
                            sums[i] += gh[k] * s[k];
                        if (NORM && GRAD_H)
                            sums[3 * N + 1 + i] += h[slab][k] * s[k];
                        if (GRAD_STREAMS) {
                            sums[N + i] += g[k] * v[k];
                            sums[2 * N + i] += g[k] * s[k];
                        }
                    }
                }
            }
            ring.advance(at, phase);
        }
        total.make(exchange[team], team, warp, lane);

        float h_s = total.get(i), h_y = total.get(3 * N);
        const float g_y = total.get(N + i), g_s = total.get(2 * N + i);
        float scale_h = 1.0f, pull_h = 0.0f;
        if (NORM) {
            const float along = over_streams(stream < N ? share * h_s : 0.0f) + share_y * h_y;
            scale_h = r_h;
            pull_h = r_h * r_h * r_h * along * SCALE;
            h_s = scale_h * h_s - pull_h * total.get(3 * N + 1 + i);
            h_y = scale_h * h_y - pull_h * total.get(4 * N + 1);
        }
        const float beta = step.beta, rest = step.rest, alpha = step.alpha;
        const float dalpha = rest * h_s + beta * h_y;
        const float dlogit = alpha * (dalpha - over_streams(alpha * dalpha));
        const float to_pool = dlogit * sqrtf(SCALE) * step.r_new;
        const float to_new = dlogit * step.logit * step.r_new * step.r_new * SCALE;
        const float along_y = g_y + alpha * h_y + to_pool * yp - to_new * (rest * sy + beta * yy);
        const float along_s = g_s + alpha * h_s + to_pool * sp - to_new * (rest * ss + beta * sy);
        const float dbeta = along_y - along_s;
        float dz;
        if (COMPETITIVE) {
            const float mean = over_streams(beta * dbeta);
            dz = beta * (dbeta - mean);
            dcarry -= step.carry * mean;
        } else {
            dz = beta * rest * dbeta;
        }
        db += dz;
        const float to_gate = dz * sqrtf(SCALE) * step.r;
        const float to_old = dz * step.gate * step.r * step.r * SCALE;
        const float pool_y = over_streams(beta * to_pool), new_y = over_streams(to_new * beta * beta);
        __syncwarp();
        if (lane < N)
            mine[lane] = {rest,  share, rest * to_pool, to_gate, -(rest * rest * to_new + to_old), -rest * to_new * beta,
                          beta, 0.0f};
        __syncwarp();

        const u64 out = dstreams + token * (N * C * BYTES), dy_row = dy + token * (C * BYTES);
        at = slot;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            const int c = slab * THREADS + member;
            if (CHUNKS % THREADS == 0 || c < CHUNKS) {
                float v[CHUNK], gh[CHUNK], to_y[CHUNK], wg[CHUNK], wp[CHUNK], s[CHUNK], g[CHUNK];
                unpack(ring.row(at, Y)[member], v);
                if (GRAD_H)
                    unpack(ring.row(at, H)[member], gh);
                gate_weights.get(slab, c, wg);
                pool_weights.get(slab, c, wp);
                if (NORM && GRAD_H) {
                    gain_weights.get(slab, c, g);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        const float scaled = scale_h * gh[k];
                        dgain[slab][k] += scaled * h[slab][k];
                        gh[k] = scaled * g[k] - pull_h * h[slab][k];
                    }
                } else if (!GRAD_H) {
#pragma unroll
                    for (int k = 0; k < CHUNK; k++)
                        gh[k] = 0.0f;
                }
#pragma unroll
                for (int k = 0; k < CHUNK; k++) {
                    to_y[k] = share_y * gh[k] + pool_y * wp[k] - new_y * v[k];
                    dpool[slab][k] += pool_y * v[k];
                }
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const Terms f = mine[i];
                    unpack(ring.row(at, i)[member], s);
                    if (GRAD_STREAMS)
                        unpack(ring.row(at, GRADS + i)[member], g);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        dgate[slab][k] += f.gate * s[k];
                        dpool[slab][k] += f.pool * s[k];
                        to_y[k] += f.y * s[k];
                        float ds = f.h * gh[k] + f.pool * wp[k] + f.gate * wg[k] + f.s * s[k] + f.y * v[k];
                        if (GRAD_STREAMS) {
                            ds += f.grad * g[k];
                            to_y[k] += f.beta * g[k];
                        }
                        s[k] = ds;
                    }
                    store(out + (i * CHUNKS + c) * 16, pack(s));
                }
                store(dy_row + c * 16, pack(to_y));
            }
            if (INVERT)
                fence_copies();
            team_sync(team);
            issue(token + ((slab + SLOTS) / SLABS) * place.stride, (slab + SLOTS) % SLABS, at, next);
            ring.advance(at, parity);
        }
        slot = at;
    }

    // Teams add up in the order of their numbers, blocks in `finish`: the same sums in every run.
    __syncthreads(); // the rings are free: their memory takes the sums of each team
    float *sums = reinterpret_cast<float *>(memory), *mine = sums + team * PARTIAL;
    put_row(mine, dgate, member);
    put_row(mine + C, dpool, member);
    if (NORM)
        put_row(mine + 2 * C + BIASES, dgain, member);
    if (warp == 0 && lane < N)
        mine[2 * C + COMPETITIVE + lane] = db;
    if (COMPETITIVE && member == 0)
        mine[2 * C] = dcarry;
    __syncthreads();
    add_teams(sums, PARTIAL, partials + (long long)blockIdx.x * PARTIAL);
}
