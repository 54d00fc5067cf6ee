// The Multi-Gate step; after team.cu. Set by the caller: COMPETITIVE, the kind of gate.

// Float32 numbers kept for a token: the dot products, 1 / rms of h and the carry, beta and alpha (see ../saved.py).
constexpr int DOTS = 4 * N + 2, BETA = DOTS + 2, ALPHA = BETA + N, SAVED = (ALPHA + N + 3) / 4 * 4;

// The bias of the stream that a lane has, and of the share that goes to no stream (competitive).
struct Bias {
    float own, rest;

    __device__ __forceinline__ Bias(const float *bias, int i)
        : own(__ldg(bias + COMPETITIVE + min(i, N - 1))), rest(COMPETITIVE ? __ldg(bias) : 0.0f) {}
};

// What the step makes of the dot products of a token; lane i (modulo LANES) has stream i's. The same to the bit in
// whichever kernel: the compiler must not merge products and sums here as it likes there.
struct Step {
    float beta, rest, carry; // gate; 1 - beta; the gate's share that goes to no stream (competitive)
    float gate, r;           // w_gate . rms(s) / sqrt(C); 1 / rms of the stream
    float alpha, logit;      // pool weight; w_pool . rms(s') / sqrt(C)
    float r_new;             // 1 / rms of the new stream

    __device__ __forceinline__ void make(float ss, float sg, float sp, float sy, float yy, float yp, Bias bias,
                                         float eps, int i) {
        const bool real = i < N;
        measure(ss, sg, eps);
        const float z = real ? __fadd_rn(gate, bias.own) : LOWEST;
        if (COMPETITIVE) {
            const float top = fmaxf(largest(z), bias.rest);
            const float e = real ? expf(z - top) : 0.0f, e0 = expf(bias.rest - top);
            const float total = __fadd_rn(over_streams(e), e0);
            beta = quotient(e, total);
            carry = quotient(e0, total);
        } else {
            beta = real ? quotient(1.0f, __fadd_rn(1.0f, expf(-z))) : 0.0f;
            carry = 0.0f;
        }
        measure_new(ss, sp, sy, yy, yp, eps);
        alpha = softmax(logit, i);
    }

    // The same of what `make` has found, of which `saved` is a token's row.
    __device__ __forceinline__ void recall(float ss, float sg, float sp, float sy, float yy, float yp, const float *saved,
                                           float eps, int i) {
        const bool real = i < N;
        beta = real ? saved[BETA + i] : 0.0f;
        alpha = real ? saved[ALPHA + i] : 0.0f;
        carry = saved[DOTS + 1];
        measure(ss, sg, eps);
        measure_new(ss, sp, sy, yy, yp, eps);
    }

  private:
    __device__ __forceinline__ void measure(float ss, float sg, float eps) {
        r = rsqrtf(__fmaf_rn(ss, SCALE, eps));
        gate = __fmul_rn(__fmul_rn(sg, r), sqrtf(SCALE));
    }

    __device__ __forceinline__ void measure_new(float ss, float sp, float sy, float yy, float yp, float eps) {
        rest = 1.0f - beta;
        const float cross = __fmul_rn(__fmul_rn(2.0f * beta, rest), sy);
        const float ss_new = __fmaf_rn(__fmul_rn(rest, rest), ss, __fmaf_rn(__fmul_rn(beta, beta), yy, cross));
        r_new = rsqrtf(__fmaf_rn(fmaxf(ss_new, 0.0f), SCALE, eps));
        logit = __fmul_rn(__fmul_rn(__fmaf_rn(rest, sp, __fmul_rn(beta, yp)), r_new), sqrtf(SCALE));
    }
};

__device__ __forceinline__ float lerp(float stream, float y, float beta) {
    return __fmaf_rn(beta, y, __fmul_rn(1.0f - beta, stream));
}

// The stream before a lerp, with factor = 1 / (1 - beta), or 0 where nothing of it is left; the same to the bit in
// whichever kernel.
__device__ __forceinline__ float unlerp(float after, float y, float beta, float factor) {
    return factor == 0.0f ? after : __fmul_rn(__fmaf_rn(-beta, y, after), factor);
}

__device__ __forceinline__ float unlerp_factor(float beta) {
    return 1.0f - beta <= EPSILON ? 0.0f : 1.0f / (1.0f - beta);
}
