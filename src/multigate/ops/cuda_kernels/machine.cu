// What the kernels ask of the machine, one function an instruction. The tests bring a CPU's version of this file.

typedef unsigned int u32;
typedef unsigned long long u64;

#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]

__device__ __forceinline__ void two_from_half(u32 word, float &low, float &high) {
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high)
        : "r"(word));
}

__device__ __forceinline__ u32 two_to_half(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ u32 two_to_bfloat(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Keeps a number in its register: else the compiler may prefer to load it anew.
__device__ __forceinline__ void pin(float &number) { asm volatile("" : "+f"(number)); }

__device__ __forceinline__ u32 shared_address(const void *p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// A barrier for one arrival and the bytes that it announces.
__device__ __forceinline__ void make_barrier(u64 *barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)));
}

__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive_expecting(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void wait(u64 *barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

// From device to shared memory, behind the thread's back; the barrier counts the bytes.
__device__ __forceinline__ void bulk_copy(const void *to, u64 from, u32 bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Memory was written through a pointer of another type: the compiler must look again.
__device__ __forceinline__ void look_again() { asm volatile("" ::: "memory"); }

// What threads have written to shared memory is done before later copies into it.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// No kernel reads what it writes, so the compiler may move loads across a store: no "memory" here.
__device__ __forceinline__ void store(u64 to, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

// Without a branch, so that what comes before and after can be mixed.
__device__ __forceinline__ void store_if(bool wanted, u64 to, uint4 v) {
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n"
                 "@wanted st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(u32(wanted)));
}

template <int THREADS> __device__ __forceinline__ void sync_some(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
