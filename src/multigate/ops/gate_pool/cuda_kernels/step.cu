// The Multi-Gate step; after team.cu. Set by the caller: COMPETITIVE, the kind of gate.

constexpr int SAVED = 4 * N + 4; // float32 numbers kept for a token

// What the step makes of the dot products of a token; lane i (modulo LANES) has stream i's.
struct Step {
    float beta, rest, carry; // gate; 1 - beta; the gate's share that goes to no stream (competitive)
    float alpha, logit;      // pool weight; w_pool . rms(s') / sqrt(C)
    float gate, r, r_new;    // w_gate . rms(s) / sqrt(C); 1 / rms of the old and of the new stream

    __device__ __forceinline__ void make(float ss, float sg, float sp, float sy, float yy, float yp, const float *bias,
                                         float eps, int i) {
        const bool real = i < N;
        const float root = sqrtf(SCALE);
        r = rsqrtf(ss * SCALE + eps);
        gate = sg * r * root;
        const float z = real ? gate + bias[COMPETITIVE + min(i, N - 1)] : LOWEST;
        if (COMPETITIVE) {
            const float top = fmaxf(largest(z), bias[0]);
            const float e = real ? expf(z - top) : 0.0f, e0 = expf(bias[0] - top);
            const float total = over_streams(e) + e0;
            beta = quotient(e, total);
            carry = quotient(e0, total);
        } else {
            beta = real ? quotient(1.0f, 1.0f + expf(-z)) : 0.0f;
            carry = 0.0f;
        }
        rest = 1.0f - beta;
        const float ss_new = rest * rest * ss + 2.0f * beta * rest * sy + beta * beta * yy;
        r_new = rsqrtf(fmaxf(ss_new, 0.0f) * SCALE + eps);
        logit = (rest * sp + beta * yp) * r_new * root;
        alpha = softmax(logit, i);
    }
};

// The stream before a lerp, with factor = 1 / (1 - beta), or 0 where nothing of it is left; the same to the bit in
// whichever kernel.
__device__ __forceinline__ float unlerp(float after, float y, float beta, float factor) {
    return factor == 0.0f ? after : __fmul_rn(__fmaf_rn(-beta, y, after), factor);
}

__device__ __forceinline__ float unlerp_factor(float beta) {
    return 1.0f - beta <= EPSILON ? 0.0f : 1.0f / (1.0f - beta);
}
