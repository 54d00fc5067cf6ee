// The end of every forward pass; after team.cu.

// A row of h, of which each thread has its chunks; with the norm RMSNorm(h) * gain, r being 1 / rms.
__device__ __forceinline__ void store_pooled(u64 row, float (&pooled)[SLABS][CHUNK], float r, const float *gain,
                                             int member) {
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        const int c = slab * THREADS + member;
        if (CHUNKS % THREADS == 0 || c < CHUNKS) {
            if (NORM) {
                float g[CHUNK];
                load_weights(gain, c, g);
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
                    pooled[slab][k] *= r * g[k];
            }
            store(row + c * 16, pack(pooled[slab]));
        }
    }
}
