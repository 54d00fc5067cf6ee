// The streams after each of STEPS steps once more, to the bit; after step.cu.
//
// The gates are those that the steps have saved. Nothing is left to be summed, so that a thread takes its chunks through
// all steps: the streams are read once, and written once a step. A block has one token.

struct Chain {
    u64 y[STEPS], saved[STEPS], out[STEPS];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    replay(const __grid_constant__ Rows streams, const __grid_constant__ Chain chain) {
    __shared__ float betas[STEPS][N];
    const Place place;
    const int member = place.member;
    const long long token = blockIdx.x;

    uint4 rows[N], given[STEPS];
    auto fetch = [&](int c) {
        if (c >= CHUNKS)
            return;
#pragma unroll
        for (int n = 0; n < N; n++)
            rows[n] = __ldg(reinterpret_cast<const uint4 *>(streams.at[n] + token * streams.step) + c);
#pragma unroll
        for (int j = 0; j < STEPS; j++)
            given[j] = __ldg(reinterpret_cast<const uint4 *>(chain.y[j] + token * (C * BYTES)) + c);
    };
    fetch(member);

    for (int b = member; b < STEPS * N; b += THREADS)
        betas[b / N][b % N] = reinterpret_cast<const float *>(chain.saved[b / N])[token * SAVED + BETA + b % N];
    __syncthreads();

#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        const int c = slab * THREADS + member;
        if (slab > 0)
            fetch(c);
        if (c < CHUNKS) {
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                float v[CHUNK], s[CHUNK];
                unpack(given[j], v);
                const u64 out = chain.out[j] + token * (N * C * BYTES);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const float beta = betas[j][n];
                    unpack(rows[n], s);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++)
                        s[k] = lerp(s[k], v[k], beta);
                    rows[n] = pack(s);
                    store(out + (n * CHUNKS + c) * 16, rows[n]);
                }
            }
        }
    }
}
