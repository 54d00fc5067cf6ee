// CUDA C++ on a CPU: what machine.cu asks of a GPU, and the words of the language that the kernels use.
//
// The threads of a block are fibers that take turns; one gives up its turn where it has to wait for others. A warp goes
// on as far as it can before the next one begins, and blocks run one after the other. Bulk copies are made as late as possible (when somebody waits for them) or as early (when they
// are issued), by the variable `eager`: a kernel that reads too early or frees a slot too early fails one of the two.

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(name) char *name = pool.data()

struct uint4 {
    u32 x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float __uint_as_float(u32 bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
inline u32 __float_as_uint(float number) {
    u32 bits;
    memcpy(&bits, &number, 4);
    return bits;
}
inline void fence_copies() {}
inline void look_again() { asm volatile("" ::: "memory"); }
inline void check_aligned(u64 address, size_t bytes) {
    if (address % bytes)
        printf("an access of %zu bytes is not aligned to them\n", bytes), abort();
}
template <class T> T __ldg(const T *p) {
    check_aligned((u64)p, sizeof(T));
    return *p;
}
inline float __frsqrt_rn(float x) { return (float)(1.0 / std::sqrt((double)x)); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline int __popcll(u64 bits) { return __builtin_popcountll(bits); }
inline int __ffsll(u64 bits) { return __builtin_ffsll(bits); }
inline int atomicAdd(int *at, int more) {
    const int was = *at;
    *at += more;
    return was;
}

struct Gathering {
    int arrived = 0;
    u32 round = 0;
};
struct Copy {
    void *to;
    u64 from;
    u32 bytes;
};
struct MemoryBarrier {
    int pending = 1;
    long long bytes = 0;
    u32 phase = 0;
    std::vector<Copy> copies;
};
struct Warp {
    Gathering gathering;
    float numbers[32];
    int integers[32];
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    u32 index;
    bool done;
};
struct Three {
    u32 x;
};

static std::vector<char> pool;
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Gathering everybody, some[16];
static std::map<u64 *, MemoryBarrier> barriers_of;
static ucontext_t home;
static Three threadIdx, blockIdx, gridDim;
static u64 progress;
static bool eager;
static void (*body)();

inline void yield() {
    const u32 me = threadIdx.x;
    swapcontext(&fibers[me].context, &home);
}

inline void gather(Gathering &g, int count) {
    const u32 round = g.round;
    if (++g.arrived == count) {
        g.arrived = 0;
        g.round++;
        progress++;
        return;
    }
    while (g.round == round)
        yield();
}

inline Warp &my_warp() { return warps[threadIdx.x / 32]; }
inline void __syncwarp() { gather(my_warp().gathering, 32); }
inline void __syncthreads() { gather(everybody, fibers.size()); }
template <int THREADS> void sync_some(int barrier) {
    if (barrier < 1 || barrier > 15)
        printf("there is no barrier %d\n", barrier), abort();
    gather(some[barrier], THREADS);
}

template <class T> T exchange_in_warp(T *room, T mine, int from) {
    const int lane = threadIdx.x % 32;
    room[lane] = mine;
    __syncwarp();
    const T found = room[from & 31];
    __syncwarp();
    return found;
}
inline float __shfl_sync(u32, float v, int from) { return exchange_in_warp(my_warp().numbers, v, from); }
inline int __shfl_sync(u32, u32 v, int from) { return exchange_in_warp(my_warp().integers, (int)v, from); }
inline int __shfl_sync(u32, int v, int from) { return exchange_in_warp(my_warp().integers, v, from); }
inline int __shfl_up_sync(u32, int v, int by) {
    const int lane = threadIdx.x % 32;
    return exchange_in_warp(my_warp().integers, v, lane < by ? lane : lane - by);
}
inline float __shfl_xor_sync(u32, float v, int mask) {
    return exchange_in_warp(my_warp().numbers, v, (threadIdx.x % 32) ^ mask);
}

inline int __reduce_add_sync(u32, int v) {
    for (int mask = 16; mask; mask /= 2)
        v += exchange_in_warp(my_warp().integers, v, (threadIdx.x % 32) ^ mask);
    return v;
}
inline u32 __ballot_sync(u32, bool yes) { return __reduce_add_sync(~0u, (u32)yes << threadIdx.x % 32); }

inline void two_from_half(u32 word, float &low, float &high) {
    _Float16 halves[2];
    memcpy(halves, &word, 4);
    low = halves[0], high = halves[1];
}
inline u32 two_to_half(float low, float high) {
    const _Float16 halves[2] = {(_Float16)low, (_Float16)high};
    u32 word;
    memcpy(&word, halves, 4);
    return word;
}
inline u32 to_bfloat(float number) {
    const u32 bits = __float_as_uint(number);
    return std::isnan(number) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 two_to_bfloat(float low, float high) { return to_bfloat(low) | to_bfloat(high) << 16; }
inline void pin(float &) {}

inline void settle(MemoryBarrier &b) {
    if (b.pending == 0 && b.bytes == 0)
        b.pending = 1, b.phase++, progress++;
}
inline void move_bytes(MemoryBarrier &b, const Copy &c) {
    memcpy(c.to, (const void *)c.from, c.bytes);
    b.bytes -= c.bytes;
}
inline void make_barrier(u64 *barrier) { barriers_of[barrier] = MemoryBarrier(); }
inline void fence_barriers() {}
inline void arrive_expecting(u64 *barrier, u32 bytes) {
    MemoryBarrier &b = barriers_of.at(barrier);
    b.bytes += bytes, b.pending--;
    settle(b);
}
inline void bulk_copy(const void *to, u64 from, u32 bytes, u64 *barrier) {
    if ((u64)to % 16 || from % 16 || bytes % 16)
        printf("a bulk copy is not aligned to 16 bytes\n"), abort();
    MemoryBarrier &b = barriers_of.at(barrier);
    const Copy copy = {(void *)to, from, bytes};
    if (eager)
        move_bytes(b, copy), settle(b);
    else
        b.copies.push_back(copy);
}
inline void wait(u64 *barrier, u32 parity) {
    MemoryBarrier &b = barriers_of.at(barrier);
    while (b.phase % 2 == parity) {
        for (const Copy &copy : b.copies)
            move_bytes(b, copy);
        b.copies.clear();
        settle(b);
        if (b.phase % 2 == parity)
            yield();
    }
}
inline void store(u64 to, uint4 v) {
    check_aligned(to, 16);
    memcpy((void *)to, &v, 16);
}

inline void store_if(bool wanted, u64 to, uint4 v) {
    if (wanted)
        store(to, v);
}

template <class... A, size_t... I> void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*reinterpret_cast<std::remove_reference_t<A> *>(arguments[I])...);
}

template <class... A> void run(void (*kernel)(A...), int blocks, int threads, int shared, void **arguments) {
    static void (*of)(A...);
    static void **with;
    of = kernel, with = arguments;
    body = [] { call(of, with, std::index_sequence_for<A...>()); };
    gridDim.x = blocks;
    fibers = std::vector<Fiber>(threads);
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
        pool.assign(shared, (char)0xff); // NaN
        warps = std::vector<Warp>((threads + 31) / 32);
        everybody = Gathering();
        for (Gathering &g : some)
            g = Gathering();
        barriers_of.clear();
        for (int i = 0; i < threads; i++) {
            Fiber &f = fibers[i];
            f.stack.resize(1 << 17);
            f.done = false;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = &home;
            makecontext(
                &f.context,
                +[] {
                    body();
                    fibers[threadIdx.x].done = true;
                    progress++;
                },
                0);
        }
        for (int left = threads; left > 0;) {
            const u64 before = progress;
            left = 0;
            for (int first = 0; first < threads; first += 32) {
                u64 moved;
                do {
                    moved = progress;
                    for (int i = first; i < min(first + 32, threads); i++) {
                        threadIdx.x = i;
                        if (!fibers[i].done)
                            swapcontext(&home, &fibers[i].context);
                    }
                } while (progress != moved);
                for (int i = first; i < min(first + 32, threads); i++)
                    left += !fibers[i].done;
            }
            if (left && progress == before)
                printf("the threads of a block wait for each other\n"), abort();
        }
        for (auto &known : barriers_of)
            if (known.second.copies.size())
                printf("a block ends before its copies have come\n"), abort();
    }
}
