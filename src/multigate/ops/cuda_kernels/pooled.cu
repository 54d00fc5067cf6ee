// The end of every forward pass; after team.cu.

// The norm's gain of a thread's chunks. Asked for before the team adds up for the norm: it waits for both at once.
struct Gain {
    float of[NORM ? SLABS : 1][CHUNK];

    __device__ __forceinline__ Gain(const float *gain, int member) {
        if (NORM) {
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++)
                if (in_row(slab, member))
                    load_weights(gain, slab * THREADS + member, of[slab]);
        }
    }
};

// A row of h, of which each thread has its chunks; with the norm RMSNorm(h) * gain, r being 1 / rms.
__device__ __forceinline__ void store_pooled(u64 row, float (&pooled)[SLABS][CHUNK], float r, const Gain &gain,
                                             int member) {
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        if (in_row(slab, member)) {
            if (NORM) {
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
                    pooled[slab][k] *= r * gain.of[slab][k];
            }
            store(row + (slab * THREADS + member) * 16, pack(pooled[slab]));
        }
    }
}
