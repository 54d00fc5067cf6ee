// The weight gradients of depth_pool; after finish.cu.

constexpr int PARTIAL = (1 + NORM) * C; // one row a block: the sums over its tokens of dquery and, with the norm, dgain

// What the teams of a block have added up, as one row. Their rings are free by then: it goes through their memory.
__device__ __forceinline__ void write_partials(char *memory, const float (&dquery)[SLABS][CHUNK],
                                               const float (&dgain)[SLABS][CHUNK], const Place &place,
                                               float *partials) {
    __syncthreads();
    float *sums = reinterpret_cast<float *>(memory), *mine = sums + place.team * PARTIAL;
    put_row(mine, dquery, place.member);
    if (NORM)
        put_row(mine + C, dgain, place.member);
    __syncthreads();
    add_teams(sums, PARTIAL, partials + (long long)blockIdx.x * PARTIAL);
}
