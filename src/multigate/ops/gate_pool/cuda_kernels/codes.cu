// What inverting a step loses, in two bits an element (see ../codes.py); after step.cu. Set by the caller: EXACT.
//
// The elements that are listed are found again by *groups*: 32 chunks of all streams of a token, the chunks of a warp.
// Every block has a part of the list for itself, in which the groups lie as they came.

#if DTYPE == 2
typedef u32 Element;
typedef unsigned char Code;
#else
typedef unsigned short Element;
typedef unsigned short Code;
#endif

constexpr int ROW_GROUPS = (CHUNKS + 31) / 32;
static_assert(!EXACT || N * CHUNK <= 64, "one bit for every element of a thread");

struct Codes {
    Code *codes;   // [tokens, N, CHUNKS]
    int *places;   // [tokens, ROW_GROUPS]: where a group begins in the list, or -1 where it found no room
    Element *list; // `room` for every block
    int *lost;     // of each block: elements that found no room
    int room;
};

__device__ __forceinline__ u32 element(uint4 raw, int k) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    return DTYPE == 2 ? words[k] : words[k / 2] >> (16 * (k % 2)) & 0xffffu;
}

// The place of a number in the order of all numbers, and back: the same function.
__device__ __forceinline__ u32 order(u32 bits) {
    const int x = DTYPE == 2 ? (int)bits : (int)(short)bits;
    return (u32)(x ^ (x >> 31 & (DTYPE == 2 ? 0x7fffffff : 0x7fff)));
}

// The codes of a chunk; `far` gets a bit for every element that is to be listed.
__device__ __forceinline__ Code encode(uint4 was, uint4 guess, u32 &far) {
    u32 codes = 0;
    far = 0;
#pragma unroll
    for (int k = 0; k < CHUNK; k++) {
        const u32 above = order(element(was, k)) - order(element(guess, k)) + 1;
        codes |= min(above, 3u) << (2 * k);
        far |= (above > 2 ? 1u : 0u) << k;
    }
    return (Code)codes;
}

__device__ __forceinline__ uint4 decode(uint4 guess, u32 codes, u32 &far) {
    u32 words[4] = {0, 0, 0, 0};
    far = 0;
#pragma unroll
    for (int k = 0; k < CHUNK; k++) {
        const u32 code = codes >> (2 * k) & 3;
        const u32 bits = order(order(element(guess, k)) + (code == 3 ? 0 : code - 1));
        far |= (code == 3 ? 1u : 0u) << k;
        if (DTYPE == 2)
            words[k] = bits;
        else
            words[k / 2] |= (bits & 0xffffu) << (16 * (k % 2));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// How many the lanes before this one have; `total`: all of them.
__device__ __forceinline__ int before_me(int count, int lane, int &total) {
    int sum = count;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const int other = __shfl_up_sync(~0u, sum, o);
        sum += lane >= o ? other : 0;
    }
    total = __shfl_sync(~0u, sum, 31);
    return sum - count;
}

// A thread's element of bit `b` of its `far`, in the ring.
template <class R> __device__ __forceinline__ Element *far_element(const R &ring, int slot, int member, int b) {
    return reinterpret_cast<Element *>(ring.row(slot, b / CHUNK) + member) + b % CHUNK;
}
