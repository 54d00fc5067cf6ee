// The end of every backward pass: the sums of the partials of all blocks, in a fixed order; after team.cu.

// Where a row of `columns` sums goes, piece by piece; a piece that is not wanted goes to null.
struct Pieces {
    float *at[4];
    int size[4];
};

// 32 columns a block of 8 warps.
extern "C" __global__ void __launch_bounds__(256)
    finish(const float *partials, const __grid_constant__ Pieces pieces, int columns, int blocks) {
    __shared__ float part[8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int column = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (column < columns)
#pragma unroll 8
        for (int b = warp; b < blocks; b += 8)
            sum += partials[(long long)b * columns + column];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns)
        return;
    for (int w = 1; w < 8; w++)
        sum += part[w][lane];
#pragma unroll
    for (int p = 0; p < 4; p++) {
        if (column >= 0 && column < pieces.size[p] && pieces.at[p])
            pieces.at[p][column] = sum;
        column -= pieces.size[p];
    }
}
